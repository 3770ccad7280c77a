# %% [markdown]
# # 19 · Pipelines
#
# A network that is too large for one device can be cut between its layers: each rank gets some of
# them, a **stage**. That is **pipeline parallelism**. But a layer needs what the layer before it
# has computed, so while one rank works, the others wait. *How do they all work at the same time?*
#
# ![Two timelines of four stages. Above, one batch goes through the stages and back: one stage at a
# time works. Below, the same batch in four micro-batches: several stages work at a time, and it
# ends after 21 units of time instead of 48.](src/drawings/pipeline_fill.svg)
#
# > **What you'll do:** send hidden states forward and gradients back, run two schedules, and
# > measure how long the stages are idle.
# >
# > **What you'll learn:** what a stage sends; what a schedule is; how large the *bubble* is, and
# > what GPipe and 1F1B hold.
# >
# > **What you need:** chapter 17 for the network, 14 for processes, 16 for `autograd.Function`, no
# > GPU, and PyTorch 2.13 or newer: `make setup TORCH=1` installs it. Reading takes {reading time},
# > running less than a minute on two cores.

# %% tags=["torch"]
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers import your_turn
from helpers.compare import largest_difference
from helpers.plotting import BLUE, ORANGE, figure, show
from ranks import ranks
from transformer import Transformer

# %% [markdown]
# ## What must come out
#
# Our network is chapter 17's transformer with four blocks, in float64, and the batch has 8
# sequences of 8 tokens. (They are random, since we compare gradients and don't train.) One process
# finds these gradients:

# %%
tokens = 8  # in a sequence
width = 16


def make_net():
    torch.manual_seed(19)
    return Transformer(20, width, heads=2, layers=4, tokens=tokens).double()  # vocabulary of 20


def mean_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gradients(net):
    found = {}
    for name, p in net.named_parameters():
        if p.grad is not None:
            found[name] = p.grad
    return found


torch.manual_seed(0)
text = torch.randint(20, (8, tokens + 1))  # 8 sequences
x = text[:, :-1]
y = text[:, 1:]  # after each token, the next one

net = make_net()
loss = mean_loss(net(x), y)
loss.backward()
whole_loss = loss.item()
whole = gradients(net)
print(f"loss {whole_loss:.3f}, {len(whole)} gradients")

# %% [markdown]
# ## Two stages
#
# We cut between the blocks. The first stage also has the embedding, the last one also the norm and
# the output:

# %%
class Embedding(nn.Module):
    """What the network does before its blocks."""

    def __init__(self, net):
        super().__init__()
        self.token = net.token
        self.place = net.place

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.token(x) + self.place(places)


def cut(net, rank, stages):
    """The layers of one rank, in their order."""
    begin = len(net.blocks) * rank // stages
    end = len(net.blocks) * (rank + 1) // stages
    layers = list(net.blocks[begin:end])
    if rank == 0:
        layers.insert(0, Embedding(net))
    if rank == stages - 1:
        layers.append(net.norm)
        layers.append(net.output)
    return nn.Sequential(*layers)


for rank in range(2):
    layers = cut(net, rank, stages=2)
    print(f"stage {rank}:", [type(layer).__name__ for layer in layers])

# %% [markdown]
# In the forward pass rank 0 sends its output, the **hidden states**, to rank 1. The backward pass
# goes the other way. Rank 1 has the loss, so it finds the gradient of what it got. Rank 0 needs
# only that gradient to go on: `hidden.backward(gradient)` is the backward pass of everything that
# made `hidden`.
#
# ![Rank 0 has the embedding and blocks 0 and 1, rank 1 blocks 2 and 3, norm, output and loss. The
# hidden states go from rank 0 to rank 1; their gradient, of the same shape, comes
# back.](src/drawings/pipeline_two_stages.svg)
#
# A message is only numbers, without autograd's graph. So what is sent is detached, and rank 1
# declares that it wants a gradient of what it has received. (`dist.recv` fills an existing tensor.)
# All ranks make the whole network here, from one seed, and use only their part of it.

# %%
def two_stages():
    rank = dist.get_rank()
    net = make_net()
    layers = cut(net, rank, stages=2)
    if rank == 0:
        hidden = layers(x)
        dist.send(hidden.detach(), dst=1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(len(x), tokens, width).double()
        dist.recv(hidden, src=0)
        hidden.requires_grad_()
        loss = mean_loss(layers(hidden), y)
        loss.backward()
        dist.send(hidden.grad, dst=0)
    return gradients(net)


found = {}
for rank, part in enumerate(ranks(two_stages)):
    print(f"rank {rank} has {len(part)} gradients")
    found.update(part)
assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# Each rank has the gradients of its own layers, and together they are those of one process. So a
# model can be divided by layers. But look at the ranks: rank 1 waits for the hidden states, then
# rank 0 for their gradient. At no time do both work.
#
# ## A schedule is a list
#
# The picture at the top has the cure: the batch is cut into **micro-batches**. While stage 1 works
# on micro-batch 0, stage 0 goes on with micro-batch 1. The gradients of all micro-batches add up in
# `.grad`, as in chapter 14's gradient accumulation.
#
# In which order should a stage run its forward and backward passes? That is called a **schedule**.
# We write it as data: for each stage a list of `("forward", i)` and `("backward", i)`, where `i` is
# the number of a micro-batch. The simplest schedule, GPipe's (Y. Huang et al., 2018,
# arXiv:1811.06965), runs all forward passes, and then all backward passes. Its list is the same for
# each stage:

# %%
def gpipe(stages, micro_batches):
    lists = []
    for stage in range(stages):
        steps = []
        for i in range(micro_batches):
            steps.append(("forward", i))
        for i in range(micro_batches):
            steps.append(("backward", i))
        lists.append(steps)
    return lists


print(gpipe(stages=2, micro_batches=3)[0])

# %% [markdown]
# ## Two neighbours, two messages
#
# Before we write the function that runs such a list, one question. With several micro-batches there
# are moments when two neighbours have something for each other: rank 0 has hidden states for rank
# 1, and rank 1 has the gradient of earlier ones for rank 0. Suppose that both send first, and then
# receive. **Predict:** what comes out?

# %% tags=["predict"]
def both_send_first():
    other = 1 - dist.get_rank()
    received = torch.empty(len(x), tokens, width).double()
    dist.send(torch.ones(len(x), tokens, width).double(), dst=other)
    dist.recv(received, src=other)
    return received.sum().item()


try:
    came_out = ranks(both_send_first, seconds=8)
except Exception as error:
    came_out = f"{type(error).__name__}: {error}"
print(came_out)

# %% tags=["fold"]
# check: what came out
assert str(came_out).startswith("TimeoutError")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Nothing came out within 8 seconds. With gloo each `send` waits until the other rank receives, and
# each rank would receive only after its own `send`. That is a **deadlock**. PyTorch reports nothing
# yet, because its own timeout is 30 minutes (`default_pg_timeout` in
# `torch/distributed/constants.py`). The message comes from `ranks`, which ends both processes.
#
# </details>
#
# With gloo one remedy is `dist.isend`, which returns at once and gives a handle, as `all_reduce`
# does with `async_op=True` in chapter 14. So no rank waits for a receiver before it goes on. The
# price is that a handle keeps its message, and so its memory, until we have waited for it. (With
# NCCL on GPUs, a send and a receive between two ranks are handed over together, by
# `batch_isend_irecv`.)
#
# ## One function runs any schedule
#
# This is what one rank does with its list. It is `two_stages` once more, with micro-batches. Two
# dictionaries keep, for each micro-batch, what came in and what came out (on the last stage the
# loss), because its backward pass needs both. Then both are dropped. Messages have no names, so
# neighbours must run the micro-batches in the same order.
#
# When do we wait for handles? When the gradient of a micro-batch comes back, its hidden states have
# arrived, so we wait for their handle then, and drop it. Before we send a gradient, we wait for the
# previous gradient's handle. So at most one gradient is kept.

# %%
def receive(source, n):
    """From the rank `source`: hidden states of n sequences, or their gradient."""
    message = torch.empty(n, tokens, width).double()
    dist.recv(message, src=source)
    return message


def run_schedule(layers, steps, x_parts, y_parts, loss_function, divide_by):
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    n = len(x_parts[0])  # sequences in a micro-batch
    inputs = {}  # by micro-batch
    outputs = {}
    hidden_sent = {}  # by micro-batch: the handle of the message
    gradient_sent = None  # the handle of the latest one
    loss = 0

    for kind, i in steps:
        if kind == "forward":
            if rank == 0:
                inputs[i] = x_parts[i]
            else:
                inputs[i] = receive(rank - 1, n).requires_grad_()
            outputs[i] = layers(inputs[i])
            if rank == last:
                outputs[i] = loss_function(outputs[i], y_parts[i]) / divide_by
                loss += outputs[i].item()
            else:
                hidden_sent[i] = dist.isend(outputs[i].detach(), dst=rank + 1)
        else:
            if rank == last:
                outputs[i].backward()
            else:
                gradient = receive(rank + 1, n)
                hidden_sent.pop(i).wait()  # it has arrived, or there would be no gradient
                outputs[i].backward(gradient)
            if rank > 0:
                if gradient_sent is not None:
                    gradient_sent.wait()
                gradient_sent = dist.isend(inputs[i].grad, dst=rank - 1)
            del inputs[i], outputs[i]

    if gradient_sent is not None:
        gradient_sent.wait()
    return loss

# %% [markdown]
# The loss of a batch is the mean over its tokens, so with $m$ micro-batches each one's loss must be
# divided by $m$. (That needs micro-batches with equally many tokens.) Two ranks run GPipe's lists
# with four micro-batches:

# %%
def with_schedule(schedule, micro_batches, divide_by):
    rank = dist.get_rank()
    stages = dist.get_world_size()
    net = make_net()
    layers = cut(net, rank, stages)
    steps = schedule(stages, micro_batches)[rank]
    x_parts = x.chunk(micro_batches)
    y_parts = y.chunk(micro_batches)
    loss = run_schedule(layers, steps, x_parts, y_parts, mean_loss, divide_by)
    return gradients(net), loss


of_rank_0, of_rank_1 = ranks(with_schedule, gpipe, 4, 4)  # 4 parts, divided by 4
part_0, _ = of_rank_0
part_1, loss = of_rank_1  # the last stage has the loss
found = {**part_0, **part_1}
print(f"loss {loss:.3f}")
assert abs(loss - whole_loss) < 1e-12
assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# Four micro-batches give what one process finds from the whole batch. **Predict:** what comes out
# if we forget to divide, and divide by 1? We look at the loss, and at a weight of each rank.

# %% tags=["predict"]
of_rank_0, of_rank_1 = ranks(with_schedule, gpipe, 4, 1)
part_0, _ = of_rank_0
part_1, loss = of_rank_1
found = {**part_0, **part_1}
print(f"loss: {loss / whole_loss:.3f} times the right one")
for name in ["blocks.0.mlp.up.weight", "output.weight"]:
    ratios = found[name] / whole[name]
    print(f"{name}: gradients {ratios.min():.3f} to {ratios.max():.3f} times the right ones")

# %% tags=["fold"]
# check: what came out, for all gradients
assert abs(loss - 4 * whole_loss) < 1e-12
for name in whole:
    assert largest_difference(found[name], 4 * whole[name]) < 1e-12

# %% [markdown]
# <details><summary>What came out</summary>
#
# Loss and gradients are four times as large, and there is no error. With plain SGD that is a
# learning rate four times as large. And if somebody changes the number of micro-batches, the
# training changes.
#
# </details>
#
# With the right divisor the gradients are right for other numbers of stages and micro-batches, too.
# Three stages aren't even equally large: one block, one block, two blocks.

# %% tags=["fold"]
# check: 1, 3 and 4 stages, 1 and 8 micro-batches
for stages in [1, 3, 4]:
    for micro_batches in [1, 8]:
        found = {}
        for part, _ in ranks(with_schedule, gpipe, micro_batches, micro_batches, world=stages):
            found.update(part)
        assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# In GPipe's list all forward passes come first. So a stage holds *all* micro-batches when the
# backward passes begin: their inputs, their outputs, and what autograd keeps of each layer.
#
# ## 1F1B: a backward pass as soon as possible
#
# Does a stage have to hold them all? Micro-batch 0 has passed the last stage long before
# micro-batch 7, so its backward pass could begin, and then it need not be held any longer. This
# schedule is called **1F1B**, one forward, one backward (PipeDream-Flush, D. Narayanan et al.,
# 2020, arXiv:2006.09503):
#
# ![Two timelines of four stages and eight micro-batches; both end at the same time. GPipe runs all
# forward passes, then all backward passes. In 1F1B a stage runs a few forward passes, then backward
# and forward in turns.](src/drawings/pipeline_schedules.svg)
#
# In the drawing a forward pass takes 1, a backward pass 2, and a message no time. Read it row by
# row. A stage's forward passes before its first backward pass are its **warm-up**: one on the last
# stage, two on the stage before it, and so on. Then comes the **steady state**, in which backward
# and forward passes take turns, and at last the **cool-down**, in which only backward passes are
# left.
#
# ### Your turn: the list of one stage
#
# Write the list of stage `stage` of `stages`. Read the order from the drawing, and take care of the
# case of fewer micro-batches than stages.

# %% tags=["fold", "your-turn"]
# define: cases for your function, five stages and their lists
last_of_4 = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1),
             ("forward", 2), ("backward", 2)]
third_of_4 = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2),
              ("backward", 1), ("backward", 2)]
two_micro_batches = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
first_of_3 = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 0), ("forward", 3),
              ("backward", 1), ("backward", 2), ("backward", 3)]
first_of_4 = [("forward", 0), ("forward", 1), ("forward", 2), ("forward", 3), ("backward", 0),
              ("forward", 4), ("backward", 1), ("backward", 2), ("backward", 3), ("backward", 4)]
cases = [
    ((3, 4, 3), last_of_4),
    ((2, 4, 3), third_of_4),
    ((0, 4, 2), two_micro_batches),
    ((0, 3, 4), first_of_3),
    ((0, 4, 5), first_of_4),
]

# %% tags=["your-turn"]
def steps_of(stage, stages, micro_batches):
    """1F1B: the list of ("forward", i) and ("backward", i) of one stage."""
    ...


your_turn(steps_of, cases)

# %% [markdown]
# Here is ours, for all stages. `warm_up` is the number of passes in the warm-up.

# %%
def one_f_one_b(stages, micro_batches):
    lists = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        steps = []
        for i in range(warm_up):
            steps.append(("forward", i))
        for i in range(micro_batches):
            steps.append(("backward", i))
            if warm_up + i < micro_batches:
                steps.append(("forward", warm_up + i))
        lists.append(steps)
    return lists


print(one_f_one_b(stages=4, micro_batches=3)[2])

# %% [markdown]
# What does a stage hold? The folded function counts, as in chapter 17, the bytes that autograd
# keeps, and here also the outputs that are sent. First for one micro-batch, which is one sequence:

# %% tags=["fold"]
# define: `most_bytes(schedule, micro_batches)`, what this stage holds at most
import weakref

from torch.autograd.graph import saved_tensors_hooks


def most_bytes(schedule, micro_batches):
    """Without parameters and token ids."""
    rank = dist.get_rank()
    stages = dist.get_world_size()
    net = make_net()
    layers = cut(net, rank, stages)
    parts = [x, y, *net.parameters()]
    left_out = {part.untyped_storage()._cdata for part in parts}  # addresses
    alive = weakref.WeakValueDictionary()  # by its address, what was saved and still exists
    most = 0

    def save(tensor):
        nonlocal most
        memory = tensor.untyped_storage()
        if memory._cdata not in left_out:
            alive[memory._cdata] = memory
        most = max(most, sum(memory.nbytes() for memory in alive.values()))
        return tensor

    def use(tensor):
        return tensor

    def save_output(module, inputs, output):
        if rank < stages - 1:
            save(output)

    layers.register_forward_hook(save_output)
    steps = schedule(stages, micro_batches)[rank]
    with saved_tensors_hooks(save, use):
        run_schedule(layers, steps, x.chunk(8), y.chunk(8), mean_loss, micro_batches)
    return most

# %%
of_one = ranks(most_bytes, gpipe, 1, world=4)
print("one micro-batch, stages 0 to 3:", of_one)

# %% [markdown]
# **Predict:** with eight micro-batches each stage of GPipe holds eight times as much. How many
# times as much does each stage of 1F1B hold at most?

# %% tags=["predict"]
times_as_much = {}
for schedule in [gpipe, one_f_one_b]:
    factors = []
    for of_eight, of_each in zip(ranks(most_bytes, schedule, 8, world=4), of_one):
        factors.append(round(of_eight / of_each, 2))
    print(f"{schedule.__name__}: stages 0 to 3 hold {factors} times as much")
    times_as_much[schedule.__name__] = factors

# %% tags=["fold"]
# check: what came out, and that the gradients of 1F1B are right
assert times_as_much == {"gpipe": [8, 8, 8, 8], "one_f_one_b": [4, 3, 2, 1]}
found = {}
for part, loss in ranks(with_schedule, one_f_one_b, 8, 8, world=4):
    found.update(part)
assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# <details><summary>What came out</summary>
#
# Stage 0 holds 4 micro-batches, stage 1 holds 3, stage 2 holds 2 and stage 3 holds 1: as many as
# its warm-up has. The gradients are the same.
#
# </details>
#
# **GPipe holds $m$ micro-batches, 1F1B at most as many as there are stages.** So with 1F1B one can
# take more micro-batches of the same size, without holding more. Why one wants more of them comes
# next.
#
# ## The bubble, on a clock
#
# How much do the stages wait? In the drawing every stage has grey parts, in which it is idle. They
# are called the **bubble**. Look at the last stage, with $p$ stages and $m$ micro-batches. It
# begins after $p-1$ forward passes of others, runs $m$ forward and $m$ backward passes, and at the
# end waits for $p-1$ backward passes of others. Let all stages take equally long, and let a forward
# and a backward pass of one micro-batch together be the unit of time. Then the step takes $m+p-1$
# units, and the stage is idle for $p-1$ of them. (The other stages are idle for as long, as you can
# count in the drawing.)
#
# $$\text{bubble} = \frac{p - 1}{m + p - 1}$$
#
# That is theory, in which messages take no time. Now we measure: four processes, real messages and
# a real clock. Four processes can't compute at the same time on two cores, so our stages *sleep*
# instead, which takes no core: 20 ms in a forward pass, and 40 ms in a backward pass. A `Function`
# with both passes (chapter 16) notes when it worked, on the clock of this machine, which is the
# same for all processes:

# %%
noted = []  # (kind, begin, end) of each pass, on this rank


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        begin = time.time()
        time.sleep(seconds)
        noted.append(("forward", begin, time.time()))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        begin = time.time()
        time.sleep(2 * ctx.seconds)
        noted.append(("backward", begin, time.time()))
        return gradient, None  # for each argument of forward


def sleeping(x):
    return Sleep.apply(x, 0.020)

# %% tags=["fold"]
# define: `on_the_clock(schedule, micro_batches)`, `run_schedule` with sleeping stages; the passes
def mean_output(outputs, y_part):
    return outputs.mean()  # it has no labels


def on_the_clock(schedule, micro_batches):
    steps = schedule(dist.get_world_size(), micro_batches)[dist.get_rank()]
    parts = []
    for i in range(micro_batches):
        part = torch.zeros(1, tokens, width).double()
        parts.append(part.requires_grad_())  # or stage 0 has no gradient
    noted.clear()
    dist.barrier()  # all begin together
    run_schedule(sleeping, steps, parts, parts, mean_output, micro_batches)
    return noted

# %% [markdown]
# The folded `on_the_clock` runs `run_schedule` with `sleeping` as a stage's layers, and returns
# what a rank has noted. We take the time from the start of the first pass to the end of the last.
# The bubble is the share of it in which a stage doesn't sleep, on average over the stages:

# %%
def bubble(of_ranks):
    begins = []
    ends = []
    working = 0
    for passes in of_ranks:
        for kind, begin, end in passes:
            begins.append(begin)
            ends.append(end)
            working += end - begin
    return 1 - working / (max(ends) - min(begins)) / len(of_ranks)

# %% [markdown]
# **Predict** it by the formula for four stages with 4 micro-batches and with 8. Will the measured
# one be larger or smaller?

# %% tags=["predict", "measured"]
recorded = {}  # by schedule and number of micro-batches: the best of three runs
for schedule in [gpipe, one_f_one_b]:
    for micro_batches in [4, 8]:
        runs = []
        for i in range(3):
            runs.append(ranks(on_the_clock, schedule, micro_batches, world=4))
        best = min(runs, key=bubble)
        recorded[schedule.__name__, micro_batches] = best
        predicted = 3 / (micro_batches + 3)
        print(f"{schedule.__name__}, {micro_batches} micro-batches: predicted {predicted:.0%},",
              f"measured {bubble(best):.0%}")

# %% tags=["fold", "measured"]
# check: each stage ran its list in order
for schedule in [gpipe, one_f_one_b]:
    for micro_batches in [4, 8]:
        of_ranks = recorded[schedule.__name__, micro_batches]
        for passes, steps in zip(of_ranks, schedule(4, micro_batches)):
            assert [kind for kind, begin, end in passes] == [kind for kind, i in steps]

# %% [markdown]
# <details><summary>What came out</summary>
#
# The formula says 43 % with 4 micro-batches and 27 % with 8, whichever schedule it is. In our runs
# the measured bubbles are larger, because whatever isn't sleep counts as idle, also messages and
# Python.
#
# </details>
#
# And this is what the stages did with 8 micro-batches. Compare it with the drawing:

# %% tags=["fold", "measured"]
# draw: when each stage worked, measured
for name, title in [("gpipe", "GPipe"), ("one_f_one_b", "1F1B")]:
    of_ranks = recorded[name, 8]
    start = min(begin for passes in of_ranks for _, begin, _ in passes)
    fig, ax = figure(f"{title}, measured", "ms", size=(7.0, 2.2))
    for rank, passes in enumerate(of_ranks):
        counts = {"forward": 0, "backward": 0}
        for kind, begin, end in passes:
            color, ink = (BLUE, "white") if kind == "forward" else (ORANGE, "black")
            left, length = 1000 * (begin - start), 1000 * (end - begin)
            ax.broken_barh([(left, length)], (rank - 0.42, 0.84), fc=color, ec="white", lw=0.5)
            ax.text(left + length / 2, rank, counts[kind], color=ink, ha="center", va="center",
                    fontsize=8)
            counts[kind] += 1
    ax.set_yticks(range(4), [f"stage {rank}" for rank in range(4)])
    ax.set_ylim(3.6, -0.6)
    show(fig, f"{title}: a timeline of four stages with eight forward and eight backward passes "
         "each, in the order of the drawing, with gaps between them.")

# %% [markdown]
# **More micro-batches make the bubble smaller. GPipe and 1F1B have the same one when messages take
# no time and all stages take equally long.** So why not a hundred micro-batches? Each must be large
# enough to keep a device busy, and a batch can't grow without end. 1F1B saves memory, because it
# holds fewer micro-batches at a time. So in the same memory a batch can have more of them.
#
# ## PyTorch's schedules
#
# `torch.distributed.pipelining` has both schedules. `PipelineStage` wraps a rank's part, and
# `schedule.step` does what our functions do: it cuts the batch, sends, runs the passes, and divides
# by $m$.

# %%
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def by_pytorch():
    rank = dist.get_rank()
    found = []
    for schedule_class in [ScheduleGPipe, Schedule1F1B]:
        net = make_net()
        layers = cut(net, rank, stages=2)
        stage = PipelineStage(layers, rank, 2, torch.device("cpu"))
        schedule = schedule_class(stage, 4, loss_fn=mean_loss)  # 4 micro-batches
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        found.append(gradients(net))
    return found


of_stage_0, of_stage_1 = ranks(by_pytorch)
for name, first, second in zip(["GPipe", "1F1B"], of_stage_0, of_stage_1):
    found = {**first, **second}
    assert largest_difference(found, whole) < 1e-12
    print(f"{name}: the gradients of one process")

# %% [markdown]
# PyTorch divides by $m$ at the end, and so also scales whatever was already in `.grad`. So set
# gradients to zero before each step (`scale_grads` in `pipelining/stage.py`).
#
# ## The module that you keep
#
# [pipeline.py](pipeline.py) has `gpipe`, `one_f_one_b`, and `train_step`, for other modules and any
# group of ranks. Instead of keeping handles it hands over a send and the next receive together, and
# waits for both, as PyTorch's 1F1B does (`batch_isend_irecv`). It finds the same as ours.

# %% tags=["fold"]
# check: the module has the same lists, and finds the same gradients
import pipeline


def with_the_module():
    rank = dist.get_rank()
    net = make_net()
    layers = cut(net, rank, stages=4)
    steps = pipeline.one_f_one_b(4, 8)[rank]
    pipeline.train_step(layers, steps, x, y, mean_loss, 8, shape=(1, tokens, width))
    return gradients(net)


assert pipeline.gpipe(4, 8) == gpipe(4, 8)
assert pipeline.one_f_one_b(4, 8) == one_f_one_b(4, 8)
ours = ranks(with_schedule, one_f_one_b, 8, 8, world=4)
of_the_module = ranks(with_the_module, world=4)
for rank in range(4):
    expected, _ = ours[rank]
    assert largest_difference(of_the_module[rank], expected) < 1e-12

# %% [markdown]
# ## When a pipeline, and where?
#
# For each token a stage sends one row of hidden states forward and one row of gradients back,
# however many layers it has. Tensor parallelism (chapter 18) sums hidden states over all ranks in
# every block, and data parallelism sends all gradients. We compute it for chapter 18's example, 8
# GPUs, 32 blocks of width 4,096, 8 sequences of 4,096 tokens and 2 bytes per number:

# %%
k = 8
hidden_bytes = 8 * 4096 * 4096 * 2
gradient_bytes = 32 * 12 * 4096 ** 2 * 2  # of the blocks
by_tensors = 4 * 32 * 2 * (k - 1) / k * hidden_bytes  # four all-reduces per block
by_data = 2 * (k - 1) / k * gradient_bytes  # one all-reduce
print(f"pipeline, a middle stage: {2 * hidden_bytes / 1e9:4.1f} GB sent in a step")
print(f"tensor parallelism:       {by_tensors / 1e9:4.1f} GB")
print(f"data parallelism:         {by_data / 1e9:4.1f} GB")

# %% [markdown]
# So here a pipeline sends least. (What it sends grows with the tokens of a step. What data
# parallelism sends doesn't.) That suits slow links, such as those between machines. D. Narayanan
# et al. (2021, arXiv:2104.04473, §3.2) advise tensor parallelism inside a machine, and a pipeline
# across machines. The price is the bubble, and stages that must take equally long.
#
# Before you train with a pipeline, take one step of a small network on it and in one process, and
# compare all gradients, as we did.
#
# ## Summary
#
# - A stage sends detached hidden states forward, and the next one sends their gradient back. Summed
#   over micro-batches, with losses divided by $m$, the gradients are those of one process.
# - Several stages work at the same time when the batch comes in micro-batches. With $p$ stages that
#   take equally long and $m$ micro-batches each is idle for $(p-1)/(m+p-1)$ of the time, if
#   messages take no time.
# - GPipe and 1F1B both have this bubble. GPipe holds $m$ micro-batches. 1F1B holds at most as many
#   as there are stages from this one to the last, if a stage also drops what it has sent.
# - If two neighbours both send first and each waits until its message is received, they deadlock.
#
# Next, chapter 20: each way of dividing has its limit, such as the number of heads, of layers, or
# of examples. So large models are trained in several ways at the same time, on ranks arranged as a
# mesh.
#
# **Further reading.** P. Qi et al., *Zero Bubble Pipeline Parallelism* (2023), arXiv:2401.10241,
# which divides the backward pass into two.

# %% [markdown]
# ## Exercises
#
# 1. **Beat the bubble.** Four ranks, eight stages: rank $r$ has the stages $r$ and $r + 4$, each
#    with half as many layers. A forward pass of such a stage takes 1, a backward pass 2; those of a
#    stage twice as large would take 2 and 4. With 8 micro-batches 1F1B has a bubble of 27 %. Write
#    lists of `(kind, i, stage)` for the four ranks with a smaller one. Predict it, then run
#    `simulate(lists, 8, 8)`.
# 2. **A slow stage.** Let stage 1 sleep twice as long in both passes. Predict the time of 8
#    micro-batches with GPipe, and measure it. What would you change?
# 3. **Tied weights.** Many language models use one matrix as embedding and as output. Make it so:
#    `net.output.weight = net.token.weight`. In a pipeline the first and the last stage then have a
#    copy each. What does each copy's gradient lack, and what must be sent?

# %% tags=["fold"]
# define: `simulate(lists, stages, micro_batches)`, the bubble when rank r works through lists[r]
def needs_of(kind, i, stage, stages):
    """The passes that must have ended before this one."""
    needs = []
    if kind == "forward" and stage > 0:
        needs.append(("forward", i, stage - 1))
    if kind == "backward":
        needs.append(("forward", i, stage))
        if stage < stages - 1:
            needs.append(("backward", i, stage + 1))
    return needs


def simulate(lists, stages, micro_batches):
    """Each list has (kind, i, stage)."""
    ended = {}  # by (kind, i, stage): when
    free = [0] * len(lists)  # when each rank has ended its last pass
    place = [0] * len(lists)  # how many passes of its list each rank has run
    passes = 2 * micro_batches * stages
    for turn in range(passes):  # at least one pass each, or they wait for each other
        for rank, steps in enumerate(lists):
            if place[rank] < len(steps):
                kind, i, stage = steps[place[rank]]
                assert stage % len(lists) == rank, "another rank has this stage"
                assert (kind, i, stage) not in ended, "this pass is there twice"
                needs = needs_of(kind, i, stage, stages)
                if all(need in ended for need in needs):
                    begin = max([free[rank]] + [ended[need] for need in needs])
                    free[rank] = begin + (1 if kind == "forward" else 2)
                    ended[kind, i, stage] = free[rank]
                    place[rank] += 1
    assert len(ended) == passes, "a pass is missing, or the ranks wait for each other"
    working = 3 * micro_batches * stages  # a forward pass takes 1, a backward pass 2
    return 1 - working / max(free) / len(lists)

# %%
lists = []
for stage, steps in enumerate(one_f_one_b(4, 8)):
    lists.append([(kind, i, stage) for kind, i in steps])
print(f"1F1B: {simulate(lists, 4, 8):.0%}")

# %% [markdown]
# ### Answer to *Your turn*
#
# First `warm_up` forward passes, then each backward pass makes room for one more forward pass.

# %% tags=["solution", "your-turn"]
def steps_of(stage, stages, micro_batches):
    warm_up = min(micro_batches, stages - stage)
    steps = []
    for i in range(warm_up):
        steps.append(("forward", i))
    for i in range(micro_batches):
        steps.append(("backward", i))
        if warm_up + i < micro_batches:
            steps.append(("forward", warm_up + i))
    return steps


your_turn(steps_of, cases)

# %% [markdown]
# ### Answer 1
#
# These are **interleaved stages**. The bubble lasts as long as it takes to reach the last *rank*
# and to come back from it, three short passes of each kind, while a rank works through 16 passes of
# each kind: 3 / (16 + 3) = 16 %. The plainest list that does it runs all micro-batches through the
# first of a rank's stages, then through the second, and back (*breadth-first*, J. Lamy-Poirier,
# 2022, arXiv:2211.05953; PyTorch's `ScheduleLoopedBFS`). It holds all micro-batches. Narayanan et
# al. (arXiv:2104.04473, §2.2) interleave 1F1B, which holds fewer (`ScheduleInterleaved1F1B`). In
# both, a rank in the middle sends twice as often as before, the first and the last rank three
# times.

# %% tags=["solution"]
lists = []
for rank in range(4):
    steps = []
    for stage in [rank, rank + 4]:
        for i in range(8):
            steps.append(("forward", i, stage))
    for stage in [rank + 4, rank]:
        for i in range(8):
            steps.append(("backward", i, stage))
    lists.append(steps)
print(f"interleaved: {simulate(lists, 8, 8):.0%}")
assert abs(simulate(lists, 8, 8) - 3 / 19) < 1e-12

# %% [markdown]
# ### Answer 2
#
# The slow stage sets the pace. Its 8 forward passes take 8 · 40 ms, its 8 backward passes 8 · 80
# ms, and the first and last ones must pass the three other stages, 3 · 20 ms and 3 · 40 ms: 1.14 s
# instead of 0.66. So stages should take equally long. Give the slow one fewer layers.

# %% tags=["solution", "measured"]
def sleeping_longer(x):
    return Sleep.apply(x, 0.040)


def with_a_slow_stage():
    rank = dist.get_rank()
    layers = sleeping_longer if rank == 1 else sleeping
    parts = [torch.zeros(1, tokens, width).double().requires_grad_() for i in range(8)]
    dist.barrier()
    begin = time.time()
    run_schedule(layers, gpipe(4, 8)[rank], parts, parts, mean_output, 8)
    dist.barrier()
    return time.time() - begin


print(f"measured: {ranks(with_a_slow_stage, world=4)[0]:.2f} s")

# %% [markdown]
# ### Answer 3
#
# Each copy has the gradient of its own use only. The gradient of the tied matrix is their sum, so
# first and last stage must add them up, by an all-reduce between these two. Without it the two
# copies would be updated differently, and no longer be the same matrix.

# %% tags=["solution"]
def tied_net():
    net = make_net()
    net.output.weight = net.token.weight
    return net


def with_tied_weights():
    rank = dist.get_rank()
    net = tied_net()
    layers = cut(net, rank, stages=2)
    steps = one_f_one_b(2, 4)[rank]
    run_schedule(layers, steps, x.chunk(4), y.chunk(4), mean_loss, 4)
    own = net.token.weight.grad.clone()
    dist.all_reduce(net.token.weight.grad)  # the two ranks are all that there are
    return own, net.token.weight.grad


net = tied_net()
mean_loss(net(x), y).backward()
for own, total in ranks(with_tied_weights):
    own_right = largest_difference(own, net.token.weight.grad) < 1e-12
    sum_right = largest_difference(total, net.token.weight.grad) < 1e-12
    print("own right:", own_right, "sum right:", sum_right)
    assert sum_right and not own_right
