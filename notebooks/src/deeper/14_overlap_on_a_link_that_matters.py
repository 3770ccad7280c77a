# %% [markdown]
# # Deeper · Overlap on a link that matters
#
# In chapter 14 the cores that compute also carry the messages. What does overlap bring where
# something else moves the data, and how large should buckets be then?
#
# > **What you'll do:** send the same buckets after the backward pass and during it: first with
# > gloo, then over a simulated link that needs no core.
# >
# > **What you'll learn:** what sending adds to a step, and how much of that overlap hides; what
# > limits the size of a good bucket, from below and from above; which sizes PyTorch takes.
# >
# > **What you need:** chapter 14 and PyTorch. Reading takes {reading time}, running a bit over a
# > minute on two cores.

# %% tags=["torch", "fold"]
# define: imports, from chapter 14's files too
import os
import sys
import time
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.plotting import BLUE, GREY, ORANGE, figure, show, timeline
from helpers.timing import spread

sys.path.insert(0, "..")  # where chapter 14's files are
from ddp_train import DDP, fill_buckets, flatten
from ranks import ranks

# %% [markdown]
# The network of chapter 14's timings: much to send for little compute. (Here 1 MB is $2^{20}$
# bytes.)

# %%
def deep():
    layers = []
    for _ in range(21):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


MB = 2**20
parameters = list(deep().parameters())
BYTES = sum(p.nbytes for p in parameters)
print(f"{len(parameters)} parameters, {BYTES / MB:.1f} MB")

# %% [markdown]
# ## Where cores carry the messages
#
# Does overlap save time on gloo? We need a `DDP` without it. In the complete DDP the hook,
# `mark_ready`, notes a parameter in `self.ready` and sends each bucket that is complete. What it
# didn't send, `finish_gradient_synchronization` sends after the pass. So this hook only notes:

# %%
class AtEnd(DDP):
    def mark_ready(self, p):
        self.ready.add(p)

# %% [markdown]
# A *limit* is the most that a bucket may hold; a larger parameter has a bucket of its own. Two
# ranks with 32 examples each make a step in five ways, in turns: nothing is sent; buckets with a
# limit of 0.01 MB, which is a message for each of 44 parameters, at the end or during the pass; and
# the same with a limit of 5 MB. A step notes when its parts begin and end:

# %% tags=["trains"]
def now_ms():
    return 1e3 * perf_counter()


def step_moments(model, optimizer, n):
    images = torch.ones(n, 512)
    labels = torch.arange(n) % 10
    moments = {"begin": now_ms()}
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    moments["backward begins"] = now_ms()
    loss.backward()
    moments["backward ends"] = now_ms()
    model.finish_gradient_synchronization()
    moments["all is there"] = now_ms()
    optimizer.step()
    moments["end"] = now_ms()
    return moments

# %% tags=["fold", "trains"]
# define: race_in_turns, which takes all ways in turns, NothingSent, and the race on gloo
def race_in_turns(models, rounds, n, before_each):
    """ms of each step, by way; `before_each(model)` is called before the clock starts."""
    optimizers = {}
    found = {}
    for name, model in models.items():
        optimizers[name] = torch.optim.SGD(model.parameters(), 0.01)
        found[name] = []
    order = np.random.default_rng(0)  # the same on both ranks
    for round_number in range(rounds + 2):
        for name in order.permutation(list(models)):
            before_each(models[name])
            moments = step_moments(models[name], optimizers[name], n)
            if round_number >= 2:  # the first two warm up
                found[name].append(moments["end"] - moments["begin"])
    return found


class Done:
    def wait(self):
        pass


class NothingSent(AtEnd):
    """Fills and empties one bucket, and sends nothing."""

    def send(self, bucket):
        self.sent.append((flatten(bucket), Done()))


def meet(model):
    dist.barrier()


def race_on_gloo(rounds):
    models = {"nothing sent": NothingSent(deep())}
    for limit in (0.01, 5):
        models[f"{limit} MB, at the end"] = AtEnd(deep(), limit)
        models[f"{limit} MB, during"] = DDP(deep(), limit)
    return race_in_turns(models, rounds, n=32, before_each=meet)


def all_reduce_alone(rounds):
    """ms of one all-reduce of all bytes, with nothing else to do."""
    found = []
    for _ in range(rounds + 2):
        buffer = torch.zeros(BYTES // 4)
        dist.barrier()
        begin = now_ms()
        dist.all_reduce(buffer)
        found.append(now_ms() - begin)
    return found[2:]


def messages_of(limit):
    return len(fill_buckets(parameters[::-1], limit * MB))


def winner(during, end):
    """Which middle half lies wholly below the other."""
    if spread(during).high < spread(end).low:
        return "during"
    if spread(end).high < spread(during).low:
        return "at the end"
    return "none"


assert winner([1, 2, 3], [7, 8, 9]) == "during"
assert winner([7, 8, 9], [1, 2, 3]) == "at the end"
assert winner([1, 8, 9], [7, 8, 9]) == "none"

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 11=>ROUNDS = 3"]
# measure: ms a step on gloo, medians and middle halves, and what sending adds to a step
ROUNDS = 11
times = ranks(race_on_gloo, ROUNDS, seconds=120)[0]
alone = spread(ranks(all_reduce_alone, ROUNDS)[0]).median
without = spread(times["nothing sent"]).median
print(f"{os.cpu_count()} cores, two ranks, and each computes with one thread")
print(f"a step in which nothing is sent: {without:.1f} ms")
print(f"an all-reduce of {BYTES / MB:.1f} MB, nothing else: {alone:.1f} ms")
print()
print("messages  at the end             during                 winner      sending adds")
for limit in (0.01, 5):
    end = times[f"{limit} MB, at the end"]
    during = times[f"{limit} MB, during"]
    cells = []
    for row in (end, during):
        low, median, high = spread(row)
        cells.append(f"{median:5.1f} ({low:.1f} to {high:.1f})")
    adds = spread(end).median - without
    print(f"{messages_of(limit):8}  {cells[0]:21}  {cells[1]:21}  {winner(during, end):10}  "
          f"{adds:.1f} ms")

# %% [markdown]
# *Winner* answers whether overlap saved time here: a winner's middle half lies wholly below the
# other's. `none` means only that these rounds don't tell. (Chapter 14's race asks the same of 44
# messages: overlapped, or naive?) Messages need cores too, and on two cores two ranks leave none
# free. **Where cores carry the messages, what overlap can bring depends on what they have free.**
#
# *Sending adds* is "at the end" less "nothing sent". Where 44 messages add more than 6, that may be
# latencies, one a message, or more waiting for the slower rank: we didn't measure them apart.
#
# ## A link of its own
#
# Suppose that a network card moves the data by itself. We imitate that by a link that only keeps a
# timetable. Its messages go one after the other, and each takes *latency + bytes / rate*.
#
# **Predict:** three messages of 4000, 0 and 9000 bytes come to a link at the moment 0. It has a
# latency of 1 ms and moves 1000 bytes a ms. When does each arrive?

# %%
class Link:
    def __init__(self, latency, rate):  # ms; bytes a ms
        self.latency = latency
        self.rate = rate
        self.free = 0  # when the last message will have arrived, in ms
        self.spans = []  # begin and end of each message

    def send(self, nbytes, at):
        begin = max(at, self.free)
        self.free = begin + self.latency + nbytes / self.rate
        self.spans.append((begin, self.free))
        return self.free


link = Link(latency=1, rate=1000)
for nbytes in [4000, 0, 9000]:
    print("arrives at", link.send(nbytes, at=0), "ms")

# %% [markdown]
# Each waits for the one before: 1 + 4, then 1, then 1 + 9 ms. For a `DDP` on this link only `send`
# changes: it asks the link when the message will arrive. `finish_gradient_synchronization` calls
# each message's `wait()`, and that now sleeps until the arrival:

# %%
class Arrival:
    def __init__(self, moment):
        self.moment = moment

    def wait(self):
        missing = self.moment - now_ms()
        if missing > 0:
            time.sleep(missing / 1e3)


class Linked(DDP):
    link = None  # a new Link, set before each step

    def send(self, bucket):
        buffer = flatten(bucket)
        moment = self.link.send(buffer.nbytes, at=now_ms())
        self.sent.append((buffer, Arrival(moment)))


class LinkedAtEnd(AtEnd, Linked):
    """mark_ready from AtEnd, send from Linked: Python asks DDP, which both extend, last."""

# %% tags=["fold"]
# check: these arrivals; an idle link begins at once; wait lasts until the arrival, and no longer
assert link.spans == [(0, 5), (5, 6), (6, 16)]
idle = Link(latency=1, rate=1000)
idle.send(0, at=0)
assert idle.send(0, at=100) == 101
arrival = Arrival(now_ms() + 50)
arrival.wait()
assert arrival.moment <= now_ms() < arrival.moment + 25
arrival.wait()  # it has arrived already
assert now_ms() < arrival.moment + 25
assert LinkedAtEnd.send is Linked.send and LinkedAtEnd.mark_ready is AtEnd.mark_ready

# %% [markdown]
# From here on nothing is really sent. We suppose that all ranks do the same at the same time. Then
# one process waits as each of them would. (`ranks` still starts it, since a `DDP` needs a group.)
# It takes 64 examples, so that the pass is long enough to hide messages. The link has a latency of
# half a millisecond and moves 1 MB a ms, about 1 GB/s.
#
# **Predict:** 44 messages, one for each parameter; or 6; or one. With which is the least left to
# wait for after the pass?

# %% tags=["fold", "measured", "trains"]
# draw: a step with 44, with 6 and with one message, each the shortest of nine
LATENCY = 0.5
RATE = MB


def new_link(model):
    model.link = Link(LATENCY, RATE)


def shortest_step(limit):
    """When the pass ended, and when each message began and ended, in ms after the pass began."""
    model = Linked(deep(), limit)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    shortest = float("inf")
    for _ in range(9):
        new_link(model)
        step = step_moments(model, optimizer, 64)
        if step["end"] - step["begin"] < shortest:
            shortest = step["end"] - step["begin"]
            moments = step
            spans = model.link.spans
    zero = moments["backward begins"]
    pass_ends = moments["backward ends"] - zero
    return pass_ends, [(begin - zero, end - zero) for begin, end in spans]


panels = {}
left = {}  # ms from the end of the pass to the last arrival, by messages
for limit in (0.01, 5, 25):
    (found,) = ranks(shortest_step, limit, world=1)
    pass_ends, spans = found
    messages = [(begin, end - begin, "communication") for begin, end in spans]
    word = "message" if len(spans) == 1 else "messages"
    name = f"{len(spans)} {word}"
    left[name] = spans[-1][1] - pass_ends
    heading = f"{name}: the last arrives {left[name]:.0f} ms after the pass"
    panels[heading] = {"backward": [(0, pass_ends, "compute")], "link": messages}
    assert len(spans) == messages_of(limit)
    link_works = sum(end - begin for begin, end in spans)
    assert np.isclose(link_works, len(spans) * LATENCY + BYTES / RATE), "not all bytes are sent"
    if len(spans) > 1:
        assert spans[0][0] < pass_ends, "the first begins during the pass"
least = min(left, key=left.get)
title = f"With {least} the least is left to send after the backward pass"
fig, axes = timeline(title, panels)
longest = max(ax.get_xlim()[1] for ax in axes)
for ax, panel in zip(axes, panels.values()):
    ax.set_xlim(0, longest)
    latencies = [(begin, LATENCY) for begin, duration, kind in panel["link"]]
    ax.broken_barh(latencies, (1 - 0.45 / 2, 0.45), fc="white", alpha=0.6)
    for begin, duration, kind in panel["link"]:
        ax.vlines(begin, 1 - 0.45 / 2, 1 + 0.45 / 2, color="black", lw=0.8)
show(fig, alt=f"{title}. Three timelines from the begin of the pass to the last arrival. With 44 "
     "messages the link begins early, and a large part of its time is latencies. With 6 it begins "
     "a little later and has few. With one it begins when the pass has ended.")

# %% [markdown]
# A black line begins each message, and its latency is pale. 44 messages begin at once, but pay 44
# latencies. One message can't begin before the last gradient is there. With six, sending begins
# during the pass, and costs six latencies. After the pass, the messages that still wait for the
# link are left, and the *last* one, which leaves with the last gradient. (These are three steps, so
# their passes aren't equally long.)
#
# How much does overlap save, in whole steps and for more limits? `race_in_turns`, from a folded
# cell above, takes all ways in turns, and calls `new_link(model)` before each step. `NothingSent`
# packs its gradients and sends nothing.

# %%
LIMITS = [0.01, 1.5, 2.5, 5, 11, 25]  # MB


def race_on_link(rounds):
    models = {"nothing sent": NothingSent(deep())}
    for limit in LIMITS:
        models[f"{limit} MB, at the end"] = LinkedAtEnd(deep(), limit)
        models[f"{limit} MB, during"] = Linked(deep(), limit)
    return race_in_turns(models, rounds, n=64, before_each=new_link)

# %% tags=["trains", "few:ROUNDS = 9=>ROUNDS = 3"]
ROUNDS = 9
link_times = ranks(race_on_link, ROUNDS, world=1, seconds=120)[0]  # by rank 0, the only one

# %% [markdown]
# In the table *link is busy* is the time that all messages take: half a millisecond each, and 1 ms
# for each of 21.1 MB.

# %% tags=["fold", "measured"]
# draw: medians and middle halves of ms a step against the number of messages
print("limit, MB  messages  link is busy  at the end  during  winner")
labels = []
for limit in LIMITS:
    count = messages_of(limit)
    labels.append(f"{count}\n{limit:g} MB")
    works = count * LATENCY + BYTES / RATE
    end = link_times[f"{limit} MB, at the end"]
    during = link_times[f"{limit} MB, during"]
    print(f"{limit:9}  {count:8}  {works:9.1f} ms  {np.median(end):7.1f} ms  "
          f"{np.median(during):6.1f}  {winner(during, end)}")
print(f"nothing sent: {np.median(link_times['nothing sent']):.1f} ms")

rows = {limit: spread(link_times[f"{limit} MB, during"]) for limit in LIMITS}
best = min(LIMITS, key=lambda limit: rows[limit].median)
beaten = [limit for limit in (LIMITS[0], LIMITS[-1]) if rows[best].high < rows[limit].low]
if len(beaten) == 2:
    title = "Neither 44 messages nor one is best"
elif beaten:
    name = "44 messages aren't" if beaten[0] == LIMITS[0] else "One message isn't"
    title = f"{name} best; for the rest this run was too unsteady"
else:
    title = "This run was too unsteady for a winner"
alike = []
for limit in LIMITS:
    if limit != best and rows[limit].low <= rows[best].high:
        alike.append(str(messages_of(limit)))
print()
print(f"shortest during the pass, by the number of messages: {messages_of(best)}; "
      f"not to be told from it: {', '.join(alike) or 'none'}")
nothing = np.median(link_times["nothing sent"])
adds_at_end = np.median(link_times[f"{best} MB, at the end"]) - nothing
adds_during = rows[best].median - nothing
if winner(link_times[f"{best} MB, during"], link_times[f"{best} MB, at the end"]) == "during":
    print(f"with {messages_of(best)} messages sending adds {adds_at_end:.1f} ms at the end, "
          f"and {adds_during:.1f} ms during the pass")
else:
    print("this run was too unsteady to say how much overlap saves")
fig, ax = figure(title, "messages, and the limit of a bucket", "ms a step")
for kind, color, style in (("at the end", ORANGE, "s--"), ("during", BLUE, "o-")):
    quartiles = [spread(link_times[f"{limit} MB, {kind}"]) for limit in LIMITS]
    low, median, high = np.transpose(quartiles)
    ax.errorbar(range(len(LIMITS)), median, (median - low, high - median), fmt=style, color=color,
                label=kind, capsize=3)
ax.axhline(np.median(link_times["nothing sent"]), color=GREY, ls=":", label="nothing sent")
ax.set_xticks(range(len(LIMITS)), labels)
ax.set_ylim(bottom=0)
ax.legend()
show(fig, alt=f"{title}. Step time against the number of messages on a simulated link, with and "
     "without overlap: medians, and bars for the middle halves.")

# %% [markdown]
# Where the run was steady enough, the last line answers: what sending costs without overlap, and
# what is left of it with overlap. With one message both ways do the same, so a difference in its
# row is noise. Noise may be larger elsewhere: of two ways whose bars overlap, neither wins.
#
# **Where a step waits for the link, a bucket should be large against the latency, and small against
# all that is sent.** In half a millisecond this link could have moved 0.5 MB. Buckets of 2.5 or
# 5 MB are five or ten times that.
#
# What if the pass takes longer? The timetable alone can tell, if gradients come evenly during it:

# %% tags=["fold"]
# check: by the timetable alone, which number of messages ends first, for passes of 10 to 40 ms
def last_arrival(buckets, pass_lasts):
    """When the last message arrives, if gradients come evenly during a pass."""
    timetable = Link(LATENCY, RATE)
    nbytes_done = 0
    for bucket in buckets:
        nbytes = sum(p.nbytes for p in bucket)
        nbytes_done += nbytes
        timetable.send(nbytes, at=pass_lasts * nbytes_done / BYTES)
    return timetable.free


backwards = parameters[::-1]
fewest = 1
for pass_lasts in (10, 20, 30, 40):  # ms
    arrivals = {}
    for limit in LIMITS:
        arrivals[messages_of(limit)] = last_arrival(fill_buckets(backwards, limit * MB), pass_lasts)
    count = min(arrivals, key=arrivals.get)
    print(f"a pass of {pass_lasts} ms: {count} messages end first, after {arrivals[count]:.1f} ms")
    assert arrivals[1] == pass_lasts + LATENCY + BYTES / RATE, "one message hides nothing"
    assert fewest <= count < 44
    fewest = count
assert fewest > 6, "more messages for a longer pass"

# %% [markdown]
# For a longer pass as many or more messages are best. It hides their latencies, and the last
# message, which it can't hide, is smaller.
#
# **On GPUs:** NCCL's kernels take a part of the GPU from the backward pass (its user guide, on CTA
# policy flags). So there, too, the sender isn't quite free. We didn't measure what that costs.
#
# ## What PyTorch takes
#
# Is PyTorch's default good? In the first step it has one bucket for all gradients of one type of
# numbers (`compute_bucket_size_limits` in `torch/nn/parallel/distributed.py`). Then it fills
# buckets anew, in the order in which gradients came (`rebuild_buckets` in `reducer.hpp`): the first
# of about 1 MB, so that sending begins soon, all others of about 25 MB.
#
# *Our network is too small for that.* All but the first megabyte of its 21 goes into the second
# bucket, which leaves at the very end. By the same timetable:

# %% tags=["fold"]
# check: PyTorch's two messages end before one message, and after six
first = []  # PyTorch's first bucket is closed when it has reached 1 MB
while sum(p.nbytes for p in first) < MB:
    first.append(backwards[len(first)])
pytorchs = [first, backwards[len(first):]]
assert sum(p.nbytes for p in pytorchs[1]) / MB < 25, "the rest fits into the second"
for pass_lasts in (10, 20, 30, 40):  # ms
    of_six = last_arrival(fill_buckets(backwards, 5 * MB), pass_lasts)
    of_two = last_arrival(pytorchs, pass_lasts)
    of_one = last_arrival([backwards], pass_lasts)
    assert of_six < of_two < of_one
    print(f"a pass of {pass_lasts} ms: six messages end after {of_six:.1f} ms, "
          f"PyTorch's two after {of_two:.1f}, one after {of_one:.1f}")

# %% [markdown]
# For such a network `DistributedDataParallel(net, bucket_cap_mb=5)` sets another limit. One of
# 200 MB fills about nine buckets, and only the last must wait for the end of the pass.
#
# ## Summary
#
# - Where cores carry the messages, overlap competes with computing for them. Whether it helps,
#   such rounds may not tell.
# - Where a link of its own carries them, overlap hides a part of the sending, but not the last
#   message, nor what is still waiting for the link.
# - Many small buckets pay many latencies. One large bucket leaves when the pass has ended. Good
#   ones are large against the latency, and small against all that is sent; for a longer pass,
#   smaller.
