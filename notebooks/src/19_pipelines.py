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
from ranks import ranks
from transformer import Transformer

# %% [markdown]
# ## What must come out
#
# Our network is chapter 17's transformer with four blocks, in float64. The batch has 8 sequences of
# 8 tokens, which are random, because we compare gradients and don't train.

# %%
tokens = 8  # in a sequence
width = 16


def make_net():
    torch.manual_seed(19)
    return Transformer(20, width, heads=2, layers=4, tokens=tokens).double()  # vocabulary of 20


torch.manual_seed(0)
text = torch.randint(20, (8, tokens + 1))  # 8 sequences
x = text[:, :-1]
y = text[:, 1:]  # after each token, the next one
print("x:", x.shape, "logits:", make_net()(x).shape)

# %% [markdown]
# One process finds these gradients, and everything below must find the same ones:

# %%
def mean_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gradients(net):
    found = {}
    for name, p in net.named_parameters():
        if p.grad is not None:
            found[name] = p.grad
    return found


net = make_net()
loss = mean_loss(net(x), y)
loss.backward()
whole = gradients(net)
print(len(whole), "gradients")

# %% [markdown]
# ## Two stages
#
# We cut between the blocks. The first stage also needs what the network does before its blocks. We
# make that a layer of its own:

# %%
class Embedding(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.token = net.token
        self.place = net.place

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.token(x) + self.place(places)


hidden = Embedding(net)(x)
print(hidden.shape)

# %% [markdown]
# The last stage also has the norm and the output:

# %%
def cut(net, rank, stages):
    """The layers of one rank, in their order."""
    count = len(net.blocks) // stages  # blocks of each stage
    first = rank * count
    layers = list(net.blocks[first:first + count])
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
# A message is only numbers, without autograd's graph. So rank 0 detaches what it sends, and rank 1
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


of_rank_0, of_rank_1 = ranks(two_stages)
print("rank 0 has", len(of_rank_0), "gradients, rank 1 has", len(of_rank_1))

# %% [markdown]
# Each rank has the gradients of its own layers. Are they, together, those of one process?

# %%
def merge(of_ranks):
    """The gradients of all ranks in one dictionary."""
    found = {}
    for of_one in of_ranks:
        found.update(of_one)
    return found


found = merge([of_rank_0, of_rank_1])
assert largest_difference(found, whole) < 1e-12
print(len(found), "gradients, equal to those of one process")

# %% [markdown]
# So a model can be divided by layers. But rank 1 waits for the hidden states, and then rank 0 for
# their gradient. They never work at the same time.
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
# arXiv:1811.06965), runs all forward passes, and then all backward passes:

# %%
def gpipe(stages, micro_batches):
    steps = []
    for i in range(micro_batches):
        steps.append(("forward", i))
    for i in range(micro_batches):
        steps.append(("backward", i))
    return [steps] * stages  # the same list for each stage


lists = gpipe(stages=2, micro_batches=3)
print("stage 0:", lists[0])
print("stage 1:", lists[1])

# %% [markdown]
# ## Both send first: a deadlock
#
# With several micro-batches two neighbours may have something for each other at the same time:
# rank 0 has hidden states for rank 1, and rank 1 has the gradient of earlier ones for rank 0. It is
# a mistake if both send first, and then receive:

# %%
def both_send_first():
    other = 1 - dist.get_rank()
    message = torch.zeros(8, tokens, width)
    dist.send(message, dst=other)
    dist.recv(message, src=other)


try:
    ranks(both_send_first, seconds=5)
except TimeoutError as error:
    print(error)

# %% [markdown]
# With gloo each `send` waits until the other rank receives, and each rank would receive only after
# its own `send`. So both wait for ever: a **deadlock**. PyTorch itself reports nothing for 30
# minutes (`default_pg_timeout` in `torch/distributed/constants.py`). Here `ranks` has ended both
# processes.
#
# With gloo the remedy is `dist.isend`. It returns at once, so no rank waits for a receiver before
# it goes on. (With NCCL the send and the receive are handed over together, as `pipeline.py` does
# below.) Like chapter 14's `all_reduce` with `async_op=True`, it gives a handle to wait for later.
#
# ## One function runs any schedule
#
# A forward pass of one micro-batch is the first half of `two_stages`: receive hidden states, unless
# this is the first stage, then compute, then send, or find the loss if this is the last stage. The
# handle of what is sent goes into the list `sent`. (The loss of a batch is the mean over its
# tokens. So with $m$ micro-batches of equally many tokens, the loss of each must be divided by
# $m$.)

# %%
def forward_pass(layers, x_part, y_part, divide_by, sent):
    """What came in, and what came out: hidden states, on the last stage the loss."""
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    if rank == 0:
        came_in = x_part
    else:
        came_in = torch.empty(len(x_part), tokens, width).double()
        dist.recv(came_in, src=rank - 1)
        came_in.requires_grad_()

    came_out = layers(came_in)
    if rank == last:
        came_out = mean_loss(came_out, y_part) / divide_by
    else:
        handle = dist.isend(came_out.detach(), dst=rank + 1)
        sent.append(handle)
    return came_in, came_out

# %% [markdown]
# The backward pass is the second half. The last stage begins with the loss, and each other stage
# with the gradient that it receives:

# %%
def backward_pass(came_in, came_out, sent):
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    if rank == last:
        came_out.backward()
    else:
        gradient = torch.empty_like(came_out)
        dist.recv(gradient, src=rank + 1)
        came_out.backward(gradient)
    if rank > 0:
        handle = dist.isend(came_in.grad, dst=rank - 1)
        sent.append(handle)

# %% [markdown]
# Now a rank works through its list. The dictionary `held` keeps, for each micro-batch, what came in
# and what came out, because its backward pass needs both. After that they are dropped. Our messages
# carry no tag, so neighbours must run the micro-batches in the same order.

# %%
def run_schedule(layers, schedule, micro_batches, divide_by):
    rank = dist.get_rank()
    stages = dist.get_world_size()
    steps = schedule(stages, micro_batches)[rank]
    x_parts = x.chunk(micro_batches)
    y_parts = y.chunk(micro_batches)
    held = {}  # by micro-batch
    sent = []

    for kind, i in steps:
        if kind == "forward":
            held[i] = forward_pass(layers, x_parts[i], y_parts[i], divide_by, sent)
        else:
            came_in, came_out = held.pop(i)
            backward_pass(came_in, came_out, sent)

    for handle in sent:
        handle.wait()

# %% [markdown]
# Two ranks run GPipe's lists with four micro-batches:

# %%
def with_schedule(schedule, micro_batches, divide_by):
    net = make_net()
    layers = cut(net, dist.get_rank(), dist.get_world_size())
    run_schedule(layers, schedule, micro_batches, divide_by)
    return gradients(net)


micro_batches = 4
divide_by = 4
found = merge(ranks(with_schedule, gpipe, micro_batches, divide_by))
assert largest_difference(found, whole) < 1e-12
print(len(found), "gradients, equal to those of one process")

# %% [markdown]
# Four micro-batches give what one process finds from the whole batch. **Predict:** what comes out
# if we forget to divide, and divide by 1? We compare each number in the gradient of one weight with
# the right one.

# %% tags=["predict"]
divide_by = 1
found = merge(ranks(with_schedule, gpipe, micro_batches, divide_by))
ratios = found["output.weight"] / whole["output.weight"]
print(f"smallest ratio {ratios.min():.3f}, largest ratio {ratios.max():.3f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The gradient is four times as large, and there is no error. With plain SGD that is a learning rate
# four times as large. And if somebody changes the number of micro-batches, the training changes.
#
# </details>
#
# ## 1F1B: a backward pass as soon as possible
#
# With GPipe a stage holds *all* micro-batches when the backward passes begin: their inputs, their
# outputs, and what autograd keeps of each layer. Is that necessary? With eight micro-batches,
# number 0 has passed the last stage long before number 7. So its backward pass could begin, and
# then the stage need not hold it any longer. This schedule is called **1F1B**, one forward, one
# backward (PipeDream-Flush, D. Narayanan et al., 2020, arXiv:2006.09503):
#
# ![Two timelines of four stages and eight micro-batches; both end at the same time. GPipe runs all
# forward passes, then all backward passes. In 1F1B a stage runs a few forward passes, then backward
# and forward in turns, so the first backward passes begin
# sooner.](src/drawings/pipeline_schedules.svg)
#
# In the drawing a forward pass takes 1, a backward pass 2, and a message no time. Read it row by
# row. Before its first backward pass, the last stage runs one forward pass, the stage before it
# two, and so on. This is the stage's **warm-up**. Then backward and forward passes take turns. At
# the end only backward passes are left.
#
# ### Your turn: the list of one stage
#
# Write the list of stage `stage` of `stages`. Read the order from the drawing, and take care of the
# case of fewer micro-batches than stages.

# %% tags=["fold", "your-turn"]
# define: cases for your function, four stages and their lists
last_of_4 = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1),
             ("forward", 2), ("backward", 2)]
third_of_4 = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2),
              ("backward", 1), ("backward", 2)]
two_micro_batches = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
first_of_3 = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 0),
              ("forward", 3), ("backward", 1), ("backward", 2), ("backward", 3)]
cases = [((3, 4, 3), last_of_4), ((2, 4, 3), third_of_4), ((0, 4, 2), two_micro_batches),
         ((0, 3, 4), first_of_3)]

# %% tags=["your-turn"]
def steps_of(stage, stages, micro_batches):
    """1F1B: the list of ("forward", i) and ("backward", i) of one stage."""
    ...


your_turn(steps_of, cases)

# %% [markdown]
# Here is ours, for all stages. `warm_up` is the number of forward passes in the warm-up:

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


print("stage 2 of 4:", one_f_one_b(stages=4, micro_batches=3)[2])

# %% [markdown]
# `run_schedule` runs these lists, too, now on four ranks. The gradients are the same:

# %%
micro_batches = 8
divide_by = 8
found = merge(ranks(with_schedule, one_f_one_b, micro_batches, divide_by, world=4))
assert largest_difference(found, whole) < 1e-12
print(len(found), "gradients, equal to those of one process")

# %% [markdown]
# And what does a stage hold? It holds a micro-batch from its forward pass until its backward pass
# has ended. So we can count in the list:

# %%
def most_held(steps):
    held = 0
    most = 0
    for kind, i in steps:
        if kind == "forward":
            held += 1
        else:
            held -= 1
        most = max(most, held)
    return most


lists = gpipe(stages=4, micro_batches=8)
for stage in range(4):
    print(f"GPipe: stage {stage} holds {most_held(lists[stage])} micro-batches at most")

# %% [markdown]
# **Predict:** how many does each stage hold at most with 1F1B?

# %% tags=["predict"]
lists = one_f_one_b(stages=4, micro_batches=8)
for stage in range(4):
    print(f"1F1B: stage {stage} holds {most_held(lists[stage])} at most")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Stage 0 holds 4 micro-batches, stage 1 holds 3, stage 2 holds 2 and stage 3 holds 1: as many as
# its warm-up has.
#
# </details>
#
# **GPipe holds $m$ micro-batches, 1F1B at most as many as there are stages.** So with 1F1B one can
# take more micro-batches of the same size, without holding more. Why does one want more
# micro-batches?
#
# ## The bubble, on a clock
#
# In the drawing every stage's row has gaps, in which it is idle. They are called the **bubble**. We
# can count it: the step takes 33 units of time. A stage works for 8 · (1 + 2) = 24 of them, and is
# idle for the other 9, which is 27 %. That holds for each stage, and for both schedules.
#
# Now we measure it, with real messages and a real clock. Four processes can't compute at the same
# time on two cores, so our stages also *sleep*, for much longer than they compute, because sleeping
# takes no core: 30 ms in a forward pass,
# and 60 ms in a backward pass. A `Function` with both passes (chapter 16) becomes one more layer at
# the end of each stage:

# %%
class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        time.sleep(0.030)
        return hidden

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.060)
        return gradient


class Sleeping(nn.Module):
    def forward(self, hidden):
        return Sleep.apply(hidden)

# %% [markdown]
# We time the second of two steps, so that what happens only once isn't counted:

# %%
def seconds_of_step(schedule, micro_batches):
    layers = cut(make_net(), dist.get_rank(), dist.get_world_size())
    layers.append(Sleeping())
    run_schedule(layers, schedule, micro_batches, micro_batches)
    dist.barrier()  # all begin together
    begin = time.time()
    run_schedule(layers, schedule, micro_batches, micro_batches)
    dist.barrier()  # all have ended
    return time.time() - begin

# %% [markdown]
# In a step a stage sleeps for 90 ms per micro-batch. The rest of the time is the bubble.
# **Predict:** how large is it with 4 micro-batches instead of 8? And with only 1?

# %% tags=["predict", "measured"]
for schedule in [gpipe, one_f_one_b]:
    for micro_batches in [8, 4, 1]:
        seconds = ranks(seconds_of_step, schedule, micro_batches, world=4)[0]
        working = micro_batches * 0.090
        idle = 1 - working / seconds
        print(f"{schedule.__name__}, {micro_batches} micro-batches:",
              f"{seconds:.2f} s, idle {idle:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Counted as above, a stage is idle for 9 of 21 units with 4 micro-batches, which is 43 %, and for
# 9 of 12 units with 1, which is 75 %. The measured bubbles are larger, because whatever isn't sleep
# counts as idle: the network's own computing, messages, Python.
#
# </details>
#
# How large is it in general? Look at the last stage in the drawing, and call the number of stages
# $p$ and the number of micro-batches $m$. First the stage waits for $p-1$ forward passes of other
# stages, and at the end for $p-1$ backward passes. In between it runs $m$ forward and $m$ backward
# passes. So if all stages take equally long, and messages no time,
#
# $$\text{bubble} = \frac{p - 1}{m + p - 1}$$
#
# **More micro-batches make the bubble smaller, and it is the same for GPipe and 1F1B.** So why not
# a hundred micro-batches? Each must be large enough to keep a device busy, and a batch can't grow
# without end. 1F1B makes more of them possible, because it holds fewer at a time.
#
# ## PyTorch's 1F1B, and the module that you keep
#
# `torch.distributed.pipelining` has both schedules. `PipelineStage` wraps a rank's part, and
# `schedule.step` does what our functions do: it cuts the batch, sends, runs the passes, and divides
# by $m$.

# %%
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def by_pytorch():
    rank = dist.get_rank()
    net = make_net()
    layers = cut(net, rank, stages=2)
    stage = PipelineStage(layers, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=mean_loss)  # 4 micro-batches
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    return gradients(net)


found = merge(ranks(by_pytorch))
assert largest_difference(found, whole) < 1e-12
print(len(found), "gradients, equal to those of one process")

# %% [markdown]
# PyTorch divides by $m$ at the end, and so also scales whatever was already in `.grad`. So set
# gradients to zero before each step (`scale_grads` in `pipelining/stage.py`).
#
# [pipeline.py](pipeline.py) has `gpipe`, `one_f_one_b`, and `train_step`, for other modules and any
# group of ranks. It hands a send and the next receive over together and waits for both, as
# PyTorch's 1F1B does (`batch_isend_irecv`). So it frees a message as soon as it has arrived. Our
# `run_schedule` keeps all of them until the end of the step.

# %%
import pipeline


def with_the_module():
    rank = dist.get_rank()
    net = make_net()
    layers = cut(net, rank, stages=2)
    steps = pipeline.one_f_one_b(2, 4)[rank]
    shape = (2, tokens, width)  # of a micro-batch's hidden states
    pipeline.train_step(layers, steps, x, y, mean_loss, 4, shape)
    return gradients(net)


found = merge(ranks(with_the_module))
assert pipeline.gpipe(2, 4) == gpipe(2, 4)
assert pipeline.one_f_one_b(2, 4) == one_f_one_b(2, 4)
assert largest_difference(found, whole) < 1e-12
print(len(found), "gradients, equal to those of one process")

# %% [markdown]
# **When should one use a pipeline, and where?** For each token a stage sends one row of hidden
# states forward and one row of gradients back, however many layers it has. Tensor parallelism sums
# hidden states over all ranks in every block (chapter 18). So a pipeline sends less, which suits
# slow links. D. Narayanan et al. (2021, arXiv:2104.04473, §3.2) advise tensor parallelism inside a
# machine, and a pipeline across machines. The price is the bubble, and all stages must take equally
# long.
#
# ## Summary
#
# - A stage sends detached hidden states forward, and the next one sends their gradient back. Summed
#   over micro-batches, with losses divided by $m$, the gradients are those of one process.
# - Several stages work at the same time when the batch comes in micro-batches. With $p$ stages that
#   take equally long and $m$ micro-batches each is idle for $(p-1)/(m+p-1)$ of the time, if
#   messages take no time.
# - GPipe and 1F1B both have this bubble. GPipe holds $m$ micro-batches. 1F1B holds at most as many
#   as there are stages from this one to the last.
# - If two neighbours both send first and each waits until its message is received, they deadlock.
#
# Next, chapter 20: each way of dividing has its limit, such as the number of heads, of layers, or
# of examples. So large models are divided in several ways at once, on ranks arranged as a
# mesh.
#
# **Further reading.** The bubble can be smaller: D. Narayanan et al. (2021), arXiv:2104.04473,
# §2.2, give each rank several short stages (*interleaved* 1F1B). P. Qi et al., *Zero Bubble
# Pipeline Parallelism* (2023), arXiv:2401.10241, divide the backward pass into two.

# %% [markdown]
# ## Exercises
#
# 1. **A slow stage.** Let stage 1 sleep twice as long in both passes. Predict the time of 8
#    micro-batches with GPipe, and measure it. What would you change?
# 2. **Tied weights.** Many language models use one matrix as embedding and as output. Make it so:
#    `net.output.weight = net.token.weight`. In a pipeline the first and the last stage then have a
#    copy each. What does each copy's gradient lack, and what must be sent?

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
# The slow stage sets the pace. Its 8 forward passes take 8 · 60 ms, its 8 backward passes 8 · 120
# ms. One forward and one backward pass in each of the three other stages come on top, 3 · 30 ms and
# 3 · 60 ms: 1.71 s instead of 0.99. So stages should take equally long. Give the slow one fewer
# layers.

# %% tags=["solution", "measured"]
def with_a_slow_stage():
    rank = dist.get_rank()
    layers = cut(make_net(), rank, stages=4)
    layers.append(Sleeping())
    if rank == 1:
        layers.append(Sleeping())  # once more
    run_schedule(layers, gpipe, 8, 8)
    dist.barrier()
    begin = time.time()
    run_schedule(layers, gpipe, 8, 8)
    dist.barrier()
    return time.time() - begin


print(f"measured: {ranks(with_a_slow_stage, world=4)[0]:.2f} s")

# %% [markdown]
# ### Answer 2
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
    net = tied_net()
    layers = cut(net, dist.get_rank(), stages=2)
    run_schedule(layers, one_f_one_b, 4, 4)
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
