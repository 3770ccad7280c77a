# %% [markdown]
# # Deeper · DDP's cases
#
# Chapter 14's DDP finds the right gradients. What can still go wrong in a training with it, and
# what tells you?
#
# > **What you'll do:** make seven mistakes on purpose, and three that the program refuses. Time two
# > processes of this machine. Send gradients in half of float32's bytes.
# >
# > **What you'll learn:** which mistakes leave all replicas equal; what happens when ranks don't
# > send the same; when a second process on one machine pays; how to send rounded gradients and
# > lose nothing for good.
# >
# > **What you need:** chapter 14 and PyTorch. Reading takes {reading time}, running a minute on two
# > cores.

# %% tags=["torch"]
import sys
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from helpers.timing import print_times

sys.path.insert(0, "..")  # where chapter 14's files are
from ddp_train import DDP, flatten, write_back
from ranks import ranks

# %% [markdown]
# `DDP` is the one of chapter 14's program, [ddp_train.py](../ddp_train.py). PyTorch's is
# `DistributedDataParallel`. A small network, equal on all ranks, and a batch of 12 examples:

# %%
def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


torch.manual_seed(1)
x = torch.randn(12, 4).double()
y = torch.arange(12) % 3


def own_part(array):
    return array.chunk(dist.get_world_size())[dist.get_rank()]


def average_gradients(net):  # as in chapter 14's `naive`
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

# %% [markdown]
# ## Equal and wrong
#
# ### 1. A loss that can't tell
#
# A test asserts that all ranks have the same gradients. **Predict:** two ranks have a layer with
# one output and *different* data, and send *nothing*. With which loss are their gradients equal,
# the mean squared error or the cross-entropy?

# %% tags=["predict"]
def own_gradient(loss):
    torch.manual_seed(dist.get_rank())  # other data on each rank
    inputs = torch.rand(8, 20)
    targets = torch.rand(8, 1)  # for cross_entropy: probabilities
    weight = torch.zeros(20, 1, requires_grad=True)
    loss(inputs @ weight, targets).backward()
    return weight.grad


for loss in [F.mse_loss, F.cross_entropy]:
    on_rank_0, on_rank_1 = ranks(own_gradient, loss)
    equal = torch.equal(on_rank_0, on_rank_1)
    print(f"{loss.__name__}: equal {equal}, rank 0's is zero {not on_rank_0.any()}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# With the cross-entropy, because both are zero: softmax of a single number is 1, whatever the
# weights.
#
# </details>
#
# PyTorch's example `multigpu.py` trains so (pytorch/examples, `ddp-tutorial-series`, commit
# 1e81da3), so nobody would notice if it sent nothing. **A test of data parallelism needs gradients
# that differ from rank to rank.**
#
# ### 2. Masked labels
#
# DDP takes the mean of the ranks' means, which is wrong for unequal shards (chapter 02). Equal
# shards can hide the same mistake: `cross_entropy` leaves out labels of -100, for example a text's
# padding, and divides by the other, *valid* ones. Here both ranks have four examples, but rank 0
# has four valid labels and rank 1 has one:

# %%
labels = y[:8].clone()
labels[5:] = -100
net = small_net()
F.cross_entropy(net(x[:8]), labels).backward()
print("one process:", net[2].bias.grad)


def masked(of_all_ranks):
    net = small_net()
    own_labels = own_part(labels)
    valid = (own_labels != -100).sum().double()
    if of_all_ranks:
        dist.all_reduce(valid)
        valid /= dist.get_world_size()  # the mean of both: 2.5
    loss = F.cross_entropy(net(own_part(x[:8])), own_labels, reduction="sum") / valid
    loss.backward()
    average_gradients(net)
    return net[2].bias.grad


for of_all_ranks in [False, True]:
    on_rank_0, on_rank_1 = ranks(masked, of_all_ranks)
    print("valid labels of all ranks:", of_all_ranks)
    print("   ", on_rank_0, on_rank_1)
    assert torch.equal(on_rank_0, on_rank_1)
assert torch.allclose(on_rank_0, net[2].bias.grad, rtol=0, atol=1e-12)

# %% [markdown]
# Divided by its own valid labels, rank 1's one label counts as much as rank 0's four, and **the
# replicas agree on it.** So divide the *sum* of a rank's losses by the mean number of valid labels
# on a rank.
#
# ### 3. Unequal shards
#
# At the end of an epoch, or on unequal devices (chapter 12), ranks may have unequal shards. Rank
# $i$ has $n_i$ of $n$ examples. DDP divides by the $k$ ranks itself, so there are two ways that are
# right on paper: a mean with the weight $k\,\frac{n_i}{n}$, or a sum divided by $\frac{n}{k}$. We
# try both, and a plain mean. In the last case rank 1 has no example at all. **Predict:** which of
# the nine gradients are those of one process?

# %% tags=["predict"]
net = small_net()
F.cross_entropy(net(x), y).backward()
whole = net[2].bias.grad


def unequal(sizes):
    rank = dist.get_rank()
    own = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], 12)
    found = {}
    for name in ["mean", "weighted mean", "sum"]:
        model = DistributedDataParallel(small_net())
        outputs = model(x[own])
        if name == "mean":
            loss = F.cross_entropy(outputs, y[own])
        elif name == "weighted mean":
            loss = 2 * sizes[rank] / 12 * F.cross_entropy(outputs, y[own])
        else:
            loss = F.cross_entropy(outputs, y[own], reduction="sum") / (12 / 2)
        loss.backward()
        found[name] = model.module[2].bias.grad
    return found


print("one process:                ", whole)
for sizes in [[6, 6], [9, 3], [12, 0]]:
    on_rank_0, on_rank_1 = ranks(unequal, sizes)
    print("shards", sizes)
    for name, gradient in on_rank_0.items():
        assert torch.equal(gradient, on_rank_1[name])
        right = torch.allclose(gradient, whole, rtol=0, atol=1e-12)
        print(f"    {name:13} right: {right!s:5}  {gradient}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# All but two. With equal shards all three are right, so **equal shards hide the mistake.** With 9
# and 3 the plain mean is wrong, because rank 1's three examples count as much as rank 0's nine.
# With 12 and 0 it is half of the right gradient: rank 1 has zeros, but counts as one of two. Prefer
# the sum: with the weighted mean an empty rank's loss is NaN, although its gradient is zero.
#
# </details>
#
# All ranks have the same gradient in each case, right or wrong, so replicas stay equal. (A rank
# without examples must still run the forward and the backward pass, or the others wait for it: see
# 7.)
#
# How much harm does the plain mean do? If the examples are dealt at random, it is right on average,
# but noisier. A mean of $n_i$ examples has $\frac{1}{n_i}$ of one example's variance. So the mean
# of $k$ such means has $\frac{1}{k^2} \sum_i \frac{1}{n_i}$ of it, as much as the mean of only
# $k^2 / \sum_i \frac{1}{n_i}$ examples. We count it out for examples with the gradients 0, 1 or 5:

# %%
def worth(sizes):
    return len(sizes)**2 / sum(1 / n for n in sizes)


kinds = torch.tensor([0.0, 1, 5])
draws = torch.cartesian_prod(kinds, kinds, kinds, kinds)  # all 81 ways to draw four examples
mean_of_means = (draws[:, :3].mean(dim=1) + draws[:, 3]) / 2  # shards of three and one
counted = kinds.var(correction=0) / mean_of_means.var(correction=0)
print(f"right on average: {mean_of_means.mean():.2f}, as one example: {kinds.mean():.2f}")
print(f"shards of 3 and 1: worth {counted:.2f} examples by the 81 draws, {worth([3, 1]):.2f} by "
      "the formula")
for sizes in [[128, 128], [192, 64], [240, 16]]:
    print(f"shards of {sizes[0]} and {sizes[1]}: worth {worth(sizes):.0f} examples")

# %% [markdown]
# Cut 240 to 16, a batch of 256 is worth only 60 examples.
#
# ### 4. A mean of percentages
#
# Five images are tested on two ranks. Rank 0 has three of them, rank 1 has two:

# %%
# 1 for an image that the model gets right
recognised = torch.tensor([1.0, 0, 1, 0, 1])


def accuracies():
    own = recognised[dist.get_rank()::2]
    percentages = own.mean()
    dist.all_reduce(percentages)
    counts = own.sum()
    dist.all_reduce(counts)
    rows = list(DistributedSampler(recognised, shuffle=False))
    return percentages / 2, counts / 5, rows


for mean_of_percentages, of_counts, rows in ranks(accuracies):
    print(f"mean of percentages: {mean_of_percentages:.0%}; counts: {of_counts:.0%}; "
          f"DistributedSampler gives images {rows}")

# %% [markdown]
# Three of five are 60 %. **Counts are added up, and then divided.** And each image must count once:
# `DistributedSampler` gives all ranks equally many, so image 0 goes to both. (The program's
# `test_accuracy` does without it.)
#
# ### 5. A sampler without set_epoch
#
# When it shuffles, which is its default, `DistributedSampler` gives each rank its share of one
# random order. Is that a new order in each epoch?

# %%
sampler = DistributedSampler(range(8), num_replicas=2, rank=1)
print("one epoch:         ", list(sampler))
print("the next:          ", list(sampler))
sampler.set_epoch(2)
print("after set_epoch(2):", list(sampler))

# %% [markdown]
# **Without `set_epoch` every epoch has the same order**, and no rank ever sees the other half.
#
# ## Ranks that don't send the same
#
# ### 6. A parameter that a rank doesn't use
#
# Chapter 14's program sends a flag with each gradient: 1 if it is there, 0 if not. Its `flatten`
# and `write_back` are the chapter's `pack` and `unpack` with these flags. Here a bucket has three
# gradients of one number: both ranks use the first, rank 0 alone the second, and nobody the third.

# %%
def three_gradients():
    by_both = nn.Parameter(torch.zeros(1))
    by_rank_0 = nn.Parameter(torch.zeros(1))
    by_nobody = nn.Parameter(torch.zeros(1))
    loss = 3 * by_both
    if dist.get_rank() == 0:
        loss = loss + 4 * by_rank_0
    loss.backward()
    bucket = [by_both, by_rank_0, by_nobody]
    packed = flatten(bucket)
    mean = packed / dist.get_world_size()
    dist.all_reduce(mean)
    write_back(bucket, mean)
    return packed.tolist(), mean.tolist(), [p.grad for p in bucket]


print("               three gradients, three flags")
for rank, (packed, mean, grads) in enumerate(ranks(three_gradients)):
    print(f"rank {rank} packs   ", packed)
    print("    the mean is", mean)
    print("    so it has  ", grads)

# %% [markdown]
# **Where a flag's mean is 0, nobody had that gradient, and it stays `None`. Where it is more, all
# ranks take the mean**, even rank 1, which had no second gradient.
#
# And PyTorch's DDP? Rank 1 leaves out a layer again. `ending` says how a function ended, and puts
# gloo's error in our words: the rank waited until the other one had left.

# %%
class LeavesOut(nn.Sequential):
    def forward(self, x):
        if dist.get_rank() == 0:
            x = self[0](x)
        return self[1](x)


def two_passes(find_unused):
    net = LeavesOut(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model = DistributedDataParallel(net, find_unused_parameters=find_unused)
    for _ in range(2):
        model(own_part(x)).sum().backward()


def ending(function, *given):
    try:
        function(*given)
    except RuntimeError as error:
        if "gloo/transport" in str(error):
            return "lost its connection"
        return str(error).split(".")[0]  # its first sentence
    return "finished"


for find_unused in [False, True]:
    on_rank_0, on_rank_1 = ranks(ending, two_passes, find_unused)
    print("find_unused_parameters:", find_unused)
    print("    rank 0:", on_rank_0)
    print("    rank 1:", on_rank_1)

# %% [markdown]
# By default rank 1's bucket is never complete, so it isn't sent. A rank begins to wait when its
# last bucket leaves (`mark_variable_ready` in `reducer.cpp`), so rank 1 doesn't wait, and its
# second forward pass raises the error. Rank 0 waits until rank 1 has left the group.
#
# ### 7. Uneven inputs
#
# Rank 1 has one batch less than rank 0, so it doesn't come to the last all-reduce. For PyTorch's
# DDP there is `join`: a rank that has no more data answers the others with zeros.

# %%
def uneven_passes(with_join):
    model = DistributedDataParallel(small_net())
    passes = 3 if dist.get_rank() == 0 else 2
    with model.join(enable=with_join):
        for _ in range(passes):
            F.cross_entropy(model(own_part(x)), own_part(y)).backward()


for with_join in [False, True]:
    print("with join:", with_join)
    for rank, text in enumerate(ranks(ending, uneven_passes, with_join)):
        print(f"    rank {rank}: {text}")

# %% [markdown]
# Without `join` rank 0 waits until rank 1 has left the group, or with gloo for half an hour
# (`default_pg_timeout`). With it, rank 0's last gradient is still divided by two, unless you pass
# `divide_by_initial_world_size=False`. The program's DDP has no `join`. **Give all ranks the same
# number of steps.**
#
# ## What the program refuses
#
# The program's DDP has a *guard*: it notes each gradient when it comes, and checks again when means
# are due and at a step; a forward pass only checks that the last one was finished. Three mistakes
# after a backward pass:

# %%
def forgot_to_finish(model):
    model(own_part(x))  # the next forward pass


def stepped_too_early(model):
    torch.optim.SGD(model.parameters(), 0.1).step()


def clipped_too_early(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.finish_gradient_synchronization()


def refusal(mistake):
    model = DDP(small_net())
    F.cross_entropy(model(own_part(x)), own_part(y)).backward()
    try:
        mistake(model)
    except RuntimeError as error:
        return str(error).split(";")[0]


for mistake in [forgot_to_finish, stepped_too_early, clipped_too_early]:
    on_ranks = ranks(refusal, mistake)
    print(f"{mistake.__name__}: {on_ranks[0]}")
    assert None not in on_ranks

# %% [markdown]
# Why not clip first? Say two ranks have the gradients 3 and -1, and clip to 1. Then they have 1 and
# -1, with the mean 0, but the mean of 3 and -1 is 1. (PyTorch's DDP averages within `backward()`,
# so what you clip afterwards is a mean.)
#
# The class's docstring lists what else it refuses, and what it can't notice: for example that one
# rank alone loads weights, or takes a step more.
#
# ## What two processes of one machine pay
#
# Between GPUs a link carries the messages. Here the cores that compute carry them, too. Is a second
# process still faster than one with the whole batch? We take 20 layers with 21 MB of gradients, one
# thread for each process, and a step without the update. One of the ways is *flat*, a single
# all-reduce of all gradients after the pass. The ways take turns, so that whatever
# disturbs the machine hits all of them:

# %% tags=["measured", "few:ROUNDS = 15=>ROUNDS = 4"]
ROUNDS = 15


def deep():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(20)])


def flat(net):
    bucket = list(net.parameters())
    mean = flatten(bucket) / dist.get_world_size()
    dist.all_reduce(mean)
    write_back(bucket, mean)


def seconds_a_step():
    net = deep()
    pytorchs = DistributedDataParallel(deep())
    # Processes that work, images on each, the model, what sends after the pass:
    ways = {
        "one, 64 images": (1, 64, net, None),
        "one, 32 images": (1, 32, net, None),
        "two, 32 images each": (2, 32, net, None),
        "    and naive": (2, 32, net, average_gradients),
        "    and flat": (2, 32, net, flat),
        "    and PyTorch's DDP": (2, 32, pytorchs, None),
    }
    times = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (processes, n, model, send) in ways.items():
            dist.barrier()  # both begin at the same time
            begin = perf_counter()
            if dist.get_rank() < processes:
                model.zero_grad()
                F.cross_entropy(model(torch.ones(n, 512)), torch.arange(n)).backward()
                if send:
                    send(model)
            dist.barrier()  # the step ends when both have ended
            times[name].append(perf_counter() - begin)
    return times


print("                      median (middle half of the rounds)")
print_times(ranks(seconds_a_step, seconds=300)[0])

# %% [markdown]
# **A second process pays if it gains more than its messages cost.** It gains what lies between the
# first row and the third, if the third is the smaller. Its messages cost what lies between the
# third and one of the last. (Where two rows' middle halves overlap, this table can't tell which is
# faster.)
#
# Two processes that send nothing don't halve the time. The second row says why: one process with
# half of the images has as many weights to read and gradients to write as with all, so it takes
# more than half of the time. Where the third row is slower still, the two are in each other's way.
# They share the memory and, on most processors, a cache. Is it that? This table can't tell. How
# would you find out?
#
# ## Half of float32's bytes
#
# Can gradients be sent as bfloat16? It has half of float32's bytes (of our float64's a quarter),
# and 8 bits of precision instead of 24. The program's DDP calls `send` for each complete bucket,
# and later copies the means into the gradients, which keep their type. So only `send` changes. (The
# sum is in bfloat16, too.)

# %%
class BFloat16(DDP):
    def send(self, bucket):
        packed = flatten(bucket) / dist.get_world_size()
        packed = packed.bfloat16()  # 2 bytes a number
        work = dist.all_reduce(packed, async_op=True)
        self.sent.append((packed, work))


def last_bias(wrap):
    model = wrap(small_net())
    F.cross_entropy(model(own_part(x)), own_part(y)).backward()
    model.finish_gradient_synchronization()
    return model.module[2].bias.grad


print("sent as float64: ", ranks(last_bias, DDP)[0])
print("sent as bfloat16:", ranks(last_bias, BFloat16)[0])

# %% [markdown]
# Two digits are right. (PyTorch has `bf16_compress_hook`, in
# `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.)
#
# ### Nothing is lost for good
#
# What is rounded off is lost, and where it is the same in each step, it adds up. With **error
# feedback** it isn't lost: a rank keeps what its message left out, the *residual*, and adds it to
# the next message (Seide et al., *1-Bit Stochastic Gradient Descent*, 2014). Here the ranks gather
# all messages and add them up in float64. (An all-reduce in bfloat16 would round the sum, too, and
# no residual would know of it.)

# %%
def sum_of_steps(kind, steps):
    """The last bias's gradients of so many steps on the same batch, added up."""
    net = small_net()
    residuals = {}
    total = torch.zeros(3).double()
    for _ in range(steps):
        net.zero_grad()
        F.cross_entropy(net(own_part(x)), own_part(y)).backward()
        for p in net.parameters():
            residual = residuals.get(p, 0)
            message = p.grad + residual
            if kind != "float64":
                message = message.bfloat16()
            if kind == "bfloat16 with feedback":
                residuals[p] = p.grad + residual - message
            messages = [torch.empty_like(message), torch.empty_like(message)]
            dist.all_gather(messages, message)
            p.grad.copy_((messages[0].double() + messages[1].double()) / 2)
        total += net[2].bias.grad
    return total


for steps in [1, 10, 100]:
    exact = ranks(sum_of_steps, "float64", steps)[0]
    print(f"the sum of {steps} gradients is off by")
    for kind in ["bfloat16", "bfloat16 with feedback"]:
        difference = ranks(sum_of_steps, kind, steps)[0] - exact
        print(f"    {difference.abs().max():.5f} ({kind})")

# %% [markdown]
# Without feedback and with the same gradient each time, the error grows linearly. (Gradients that
# change are rounded up and down, and it grows more slowly.) With feedback the sum is off only by
# what the last messages left out. PyTorch's `PowerSGDState` has it as `use_error_feedback`, and
# MXNet's gradient compression keeps residuals, too.
#
# ## Summary
#
# | mistake | replicas | what tells you |
# | --- | --- | --- |
# | 1. a loss without gradient | equal | gradients that are zero |
# | 2. masked labels | equal | one process with the whole batch |
# | 3. unequal shards | equal | one process, and a test on unequal shards |
# | 4. a mean of percentages | equal | one process |
# | 5. no `set_epoch` | equal | printing the order |
# | 6. unused on one rank (PyTorch's) | | one rank waits, one fails |
# | 7. uneven inputs | | one rank waits |
#
# **Equal replicas are no proof.** Compare with one process, by a loss that has a gradient.
