# %% [markdown]
# # Deeper · DDP's cases
#
# Which mistakes are made with DDP, and what tells you? They are of three kinds: replicas that are
# equal and wrong, ranks that wait or mix up messages, and calls that do less than they seem to. Two
# more questions follow, on bytes and on memory.
#
# > **What you'll do:** make eight mistakes on purpose. Then send half the bytes, and see whether a
# > DDP that nobody needs any more is freed.
# >
# > **What you'll learn:** which mistakes a comparison of replicas can't see; what happens when
# > ranks disagree about what to send; where our DDP differs from PyTorch's.
# >
# > **What you need:** chapter 14 and PyTorch. Reading takes {reading time}, running about a minute
# > on two cores.

# %% tags=["torch", "fold"]
# define: imports, from chapter 14's files too
import gc
import sys
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 14's files are
from ddp_train import DDP, broadcast_module, flatten, lenet, make_data
from ranks import ranks

# %% [markdown]
# `DDP` is **ours**, the complete one of chapter 14. PyTorch's is `DistributedDataParallel`.
# `ranks(function, ...)` runs a function on two processes, and lists what ranks 0 and 1 returned.
#
# A small network, equal on both ranks, and a batch of 12, half of it for each:

# %%
def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


torch.manual_seed(1)
x = torch.randn(12, 4).double()
y = torch.arange(12) % 3


def own_part(array):
    parts = array.tensor_split(dist.get_world_size())
    return parts[dist.get_rank()]


def own_gradients(net):
    return [p.grad for p in net.parameters()]


def average_gradients(net):  # as in chapter 14's `naive`
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

# %% [markdown]
# ## Equal and wrong
#
# Which mistakes leave all replicas equal?
#
# ### 1. A loss that can't tell
#
# A test asserts that all ranks end with equal weights. **Predict:** two ranks train a layer with
# one output, on *different* data, and send *nothing*. With which loss are their weights equal, the
# mean squared error or the cross-entropy?

# %% tags=["trains"]
def train_in_silence(loss):
    torch.manual_seed(dist.get_rank())  # other data on each rank
    inputs = torch.rand(8, 20)
    targets = torch.rand(8, 1)  # cross_entropy takes them as probabilities of the only class
    weight = torch.zeros(20, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss(inputs @ weight, targets).backward()
        optimizer.step()
    return weight.detach()


for loss in [F.mse_loss, F.cross_entropy]:
    weight_0, weight_1 = ranks(train_in_silence, loss)
    print(loss.__name__, "- weights equal:", torch.equal(weight_0, weight_1),
          "- moved:", bool(weight_0.any()))

# %% [markdown]
# Softmax of a single number is 1, whatever the number. So this `cross_entropy` has no gradient, and
# nobody moved. PyTorch's example `multigpu.py` trains so (pytorch/examples, `ddp-tutorial-series`,
# commit 1e81da3). **A test of data parallelism needs gradients that differ from rank to rank.**

# %% tags=["fold"]
# check: what the text says of both losses
weight_0, weight_1 = ranks(train_in_silence, F.cross_entropy)
assert torch.equal(weight_0, weight_1) and not weight_0.any()
weight_0, weight_1 = ranks(train_in_silence, F.mse_loss)
assert not torch.equal(weight_0, weight_1) and weight_0.any()

# %% [markdown]
# ### 2. Means of unequal shards
#
# Both DDPs divide the sum over ranks by the number of *ranks*. Two ranks share eight examples, and
# take as losses the means of 4 and 4; the sums of 4 and 4; the means of 5 and 3; or the sums of 5
# and 3, times 2/8. `right` is the gradient of the mean over all eight. **Predict:** which of these
# are right, and which a multiple of it? We print the smallest and the largest ratio of all entries.

# %%
net = small_net()
F.cross_entropy(net(x[:8]), y[:8]).backward()
right = torch.cat([gradient.flatten() for gradient in own_gradients(net)])


def averaged(sizes, reduction, factor):
    model = DDP(small_net())
    x_shard = x[:8].split(sizes)[dist.get_rank()]
    y_shard = y[:8].split(sizes)[dist.get_rank()]
    loss = F.cross_entropy(model(x_shard), y_shard, reduction=reduction)
    (factor * loss).backward()
    model.finish_gradient_synchronization()
    return torch.cat([gradient.flatten() for gradient in own_gradients(model)])


def print_ratios(sizes, reduction, factor):
    found, other = ranks(averaged, sizes, reduction, factor)
    assert torch.equal(found, other), "the replicas agree, right or wrong"
    ratios = found / right  # entry by entry
    print(f"{reduction:4} of {sizes} times {factor}: "
          f"{ratios.min():.2f} to {ratios.max():.2f} times the right gradient")


print_ratios([4, 4], "mean", factor=1)
print_ratios([4, 4], "sum", factor=1)
print_ratios([5, 3], "mean", factor=1)
print_ratios([5, 3], "sum", factor=2 / 8)

# %% [markdown]
# Means of 5 and 3 point in *another direction*, where entries may even change their sign: each of
# the five examples counts 1/10, each of the three 1/6. **The replicas agree on it.** Sums are right
# when each rank multiplies its own by $k/n$, with $k$ ranks and $n$ examples in all, here 2/8: DDP
# divides by $k$, and $1/n$ is left (chapter 12).

# %% tags=["fold"]
# check: right, four times too large, in another direction, right; PyTorch's divides by ranks too
def averaged_by_pytorch():
    model = DistributedDataParallel(small_net())
    x_shard = x[:8].split([5, 3])[dist.get_rank()]
    y_shard = y[:8].split([5, 3])[dist.get_rank()]
    (2 / 8 * F.cross_entropy(model(x_shard), y_shard, reduction="sum")).backward()
    return torch.cat([gradient.flatten() for gradient in own_gradients(model)])


def worst_ratio(*case):
    found, _ = ranks(averaged, *case)
    return largest_difference(found / right, torch.ones_like(right))


assert worst_ratio([4, 4], "mean", 1) < 1e-9
assert worst_ratio([4, 4], "sum", 1 / 4) < 1e-9
assert worst_ratio([5, 3], "sum", 2 / 8) < 1e-9
assert largest_difference(ranks(averaged_by_pytorch)[0], right) < 1e-12
found, _ = ranks(averaged, [5, 3], "mean", 1)
nearest = (found @ right) / (right @ right) * right  # the multiple that is nearest
assert largest_difference(found, nearest) > 1e-2, "no multiple"

# %% [markdown]
# ### 3. Clipping too early
#
# Gradients are averaged, and clipped to a norm of 0.1. **Predict:** does the order matter, and can
# you see it by comparing replicas? (Differences are shares of the largest entry.)

# %%
def clipped(order):
    net = small_net()
    F.cross_entropy(net(own_part(x)), own_part(y)).backward()
    if order == "clip, then average":
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        average_gradients(net)
    else:
        average_gradients(net)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return own_gradients(net)


net = small_net()
F.cross_entropy(net(x), y).backward()
nn.utils.clip_grad_norm_(net.parameters(), 0.1)
whole = own_gradients(net)
for order in ["clip, then average", "average, then clip"]:
    mine, other = ranks(clipped, order)
    between = largest_difference(mine, other)
    from_whole = largest_difference(mine, whole)
    print(f"{order}: {between:.2f} between the replicas, {from_whole:.2f} from the whole batch")

# %% [markdown]
# **The mean of clipped gradients isn't the clipped mean, and again the replicas agree.** PyTorch's
# DDP averages within `backward()`, so what you clip is averaged. Ours raises an error if you clip
# before `finish_gradient_synchronization()`:

# %% tags=["fold"]
# check: the order matters, by more than a tenth, replicas agree; ours refuses the wrong order
def clipped_before_the_means():
    model = DDP(small_net())
    F.cross_entropy(model(own_part(x)), own_part(y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    try:
        model.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error)


assert largest_difference(ranks(clipped, "clip, then average"), whole) > 0.1
assert largest_difference(ranks(clipped, "average, then clip"), whole) < 1e-12
for order in ["clip, then average", "average, then clip"]:
    mine, other = ranks(clipped, order)
    assert largest_difference(mine, other) == 0
for text in ranks(clipped_before_the_means):
    assert text.startswith("a gradient was changed")
print(text)

# %% [markdown]
# ## Ranks that wait, or mix up messages
#
# What if ranks don't send the same?
#
# ### 4. A parameter unused on one rank
#
# A network of two layers: rank 0 computes `upper(lower(x))`, rank 1 leaves out `lower` and computes
# `upper(x)`. **Predict:** which finish two steps? Our DDP, PyTorch's with
# `find_unused_parameters=True`, and PyTorch's by default?
#
# `branch_steps(wrap, left_out)` makes these steps with the network that `wrap` made a DDP of.
# `ending(function, ...)` runs a function, and says how it ended. For "waited until the other rank
# had ended" gloo itself says `[.../gloo/transport/tcp/pair.cc:...] Read error ...`, or the like.

# %% tags=["fold", "trains"]
# define: Branch, the network; three ways to wrap it; branch_steps; ending
class Branch(nn.Module):
    def __init__(self, left_out):
        super().__init__()
        self.lower = nn.Linear(4, 4)
        self.upper = nn.Linear(4, 4)
        self.left_out = left_out  # by rank 1

    def forward(self, x):
        if dist.get_rank() == 0:
            return self.upper(self.lower(x))
        if self.left_out == "lower":
            return self.upper(x)
        return self.lower(x)


def our_ddp(net):
    return DDP(net)


def pytorchs(net):
    return DistributedDataParallel(net)


def pytorchs_that_finds_unused(net):
    return DistributedDataParallel(net, find_unused_parameters=True)


def branch_steps(wrap, left_out):
    torch.manual_seed(14)
    model = wrap(Branch(left_out).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(own_part(x)).square().mean().backward()
        if isinstance(model, DDP):
            model.finish_gradient_synchronization()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def ending(function, *given):
    """"finished", or the first sentence of the error; gloo's, when the other ended, in words."""
    try:
        function(*given)
    except Exception as error:
        if "gloo/transport" in str(error):
            return "waited until the other rank had ended"
        return str(error).split(".")[0]
    return "finished"

# %% tags=["trains"]
left_out = "lower"  # by rank 1
for wrap in [our_ddp, pytorchs_that_finds_unused, pytorchs]:
    on_rank_0, on_rank_1 = ranks(ending, branch_steps, wrap, left_out)
    print(wrap.__name__)
    print("    rank 0:", on_rank_0)
    print("    rank 1:", on_rank_1)

# %% [markdown]
# By default, PyTorch's rank 0 sends its gradients, and waits for rank 1's at the end of its first
# backward pass. On rank 1 `lower` has no gradient, so the bucket with it is never complete, and
# isn't sent. A rank begins to wait when its last bucket leaves (`mark_variable_ready` in
# `reducer.cpp`). Rank 1's never leaves, so rank 1 never waits. Its second forward pass raises the
# error. That ends rank 1, and with it rank 0's waiting.
#
# With `find_unused_parameters=True` a missing gradient counts as zero, as with ours.

# %% tags=["fold"]
# check: ours ends as PyTorch's with find_unused_parameters, whether lower or upper is left out
def buckets_of_one(net):
    return DDP(net, 1e-6)  # one parameter each


for left_out in ("lower", "upper"):
    theirs = ranks(branch_steps, pytorchs_that_finds_unused, left_out)
    for wrap in (our_ddp, buckets_of_one):
        assert largest_difference(ranks(branch_steps, wrap, left_out), theirs[0]) < 1e-12

# %% [markdown]
# And if rank 1 leaves out `upper`? The backward pass comes to `upper` first. Rank 1 must send zeros
# for it, but learns only at the end of the pass that no gradient came. `lower`'s gradient is there
# before. May rank 1 send that first? With made-up gradients:
#
# ![In the same order upper meets upper and lower meets lower. In another order rank 0's upper meets
# rank 1's lower, and the sums mix two gradients.](../src/drawings/ddp_crossed.svg)
#
# **Predict:** what does each rank take for the sum of `upper`, and of `lower`?

# %%
def sums(order_on_rank_1):
    if dist.get_rank() == 0:
        gradient = {"upper": torch.tensor(10.0), "lower": torch.tensor(1.0)}
        order = ["upper", "lower"]
    else:
        gradient = {"upper": torch.tensor(0.0), "lower": torch.tensor(2.0)}
        order = order_on_rank_1
    for name in order:
        dist.all_reduce(gradient[name])  # in place
    return gradient["upper"].item(), gradient["lower"].item()


for order in [["upper", "lower"], ["lower", "upper"]]:
    print("rank 1 sends", order[0], "before", order[1])
    for rank, (upper, lower) in enumerate(ranks(sums, order)):
        print(f"    rank {rank} has upper: {upper:g}, lower: {lower:g}")

# %% [markdown]
# 12 is rank 0's `upper` plus rank 1's `lower`, 10 + 2. **Messages meet by their place in the order,
# not by name**, and where they are equally long no error is raised. So in our `DDP` a complete
# bucket waits until those before it have left.

# %% tags=["fold"]
# check: these sums
assert ranks(sums, ["upper", "lower"]) == [(10, 3)] * 2
assert ranks(sums, ["lower", "upper"]) == [(12, 1), (1, 12)]

# %% [markdown]
# ### 5. Uneven inputs
#
# Rank 1 has one batch less than rank 0, so it doesn't come to the last all-reduce. For PyTorch's
# DDP there is `join`: a rank that has no more data answers the others with zeros. The sum is still
# divided by two, so in the last step, where rank 0 is alone, its gradient counts half
# (`divide_by_initial_world_size=True`). **Predict:** which are equal on both ranks in the end,
# weights or momentum?

# %% tags=["trains"]
def sgd_steps(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(own_part(x)), own_part(y)).backward()
        optimizer.step()


def uneven_steps(with_join):
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps = 3 if dist.get_rank() == 0 else 2
    if with_join:
        with model.join():
            sgd_steps(model, optimizer, steps)
    else:
        sgd_steps(model, optimizer, steps)
    weight = model.module[0].weight
    momentum = optimizer.state[weight]["momentum_buffer"]  # where SGD keeps it
    return weight.detach(), momentum

# %% tags=["trains"]
for rank, text in enumerate(ranks(ending, uneven_steps, False)):
    print(f"without join, rank {rank}: {text}")
(weight_0, momentum_0), (weight_1, momentum_1) = ranks(uneven_steps, True)
print("with join, weights equal:", torch.equal(weight_0, weight_1))
print("with join, momentum equal:", torch.equal(momentum_0, momentum_1))

# %% [markdown]
# At the end `join` gives rank 1 the weights, but not the optimizer's state: its momentum is that of
# two steps. Without `join` rank 0 waits until rank 1 has ended, or with gloo for half an hour
# (`default_pg_timeout`). Ours has no `join`. **Give all ranks the same number of steps.**

# %% tags=["fold", "trains"]
# check: one process finds these weights if it halves rank 0's gradient in the last step
net = small_net()
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
x_shards = x.tensor_split(2)
y_shards = y.tensor_split(2)
for step in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x_shards[0]), y_shards[0]) / 2
    if step < 2:
        loss = loss + F.cross_entropy(net(x_shards[1]), y_shards[1]) / 2
    loss.backward()
    optimizer.step()
assert largest_difference(weight_0, net[0].weight) < 1e-12
assert torch.equal(weight_0, weight_1) and not torch.equal(momentum_0, momentum_1)

# %% [markdown]
# ## Calls that do less than they seem to
#
# Which calls are these? (After cases 7 and 8 replicas are equal, too.)
#
# ### 6. Averaging replicas that begin apart
#
# Each rank draws its own weights. From then on all gradients are averaged. **Predict:** does a
# weight of rank 0 come closer to rank 1's, in five steps of plain SGD?

# %% tags=["trains"]
def gaps(broadcast):
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(4, 3).double()
    if broadcast:
        broadcast_module(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    weight_before = net.weight[0, 0].item()
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(net(own_part(x)), own_part(y)).backward()
        average_gradients(net)
        optimizer.step()
    return weight_before, net.weight[0, 0].item()


for broadcast in [False, True]:
    (before_0, after_0), (before_1, after_1) = ranks(gaps, broadcast)
    print(f"broadcast {broadcast}: {before_0 - before_1:.4f} apart, "
          f"after five steps {after_0 - after_1:.4f}")

# %% [markdown]
# Both make the same step, so the gap stays. **Averaged gradients keep replicas equal, and don't
# make them so: a broadcast does.** Both DDPs begin with it.

# %% tags=["fold"]
# check: without the broadcast the gap is there, and stays; with it there is none
(before_0, after_0), (before_1, after_1) = ranks(gaps, False)
assert abs(before_0 - before_1) > 1e-3
assert abs((before_0 - before_1) - (after_0 - after_1)) < 1e-12
on_rank_0, on_rank_1 = ranks(gaps, True)
assert on_rank_0 == on_rank_1

# %% [markdown]
# ### 7. A sampler without set_epoch
#
# PyTorch's `DistributedSampler` gives each rank its share of one random order, from a seed that all
# ranks share. `shuffle=True` seems to say that each epoch has a new order:

# %%
sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=True)
print("one epoch:   ", list(sampler))
print("the next:    ", list(sampler))
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(f"set_epoch({epoch}):", list(sampler))

# %% [markdown]
# **Without `set_epoch` every epoch has the same order**, and rank 1 never sees the other half.

# %% tags=["fold"]
# check: the order stays, on both ranks, until set_epoch is called
for rank in range(2):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=True)
    before = list(sampler)
    assert list(sampler) == before and len(before) == 4
    sampler.set_epoch(1)
    assert list(sampler) != before

# %% [markdown]
# ### 8. A checkpoint of the weights alone
#
# Momentum is state too. `ten_steps()` trains without a break. With `break_after=5` it goes on with
# a new optimizer, which gets the old one's state or doesn't:

# %% tags=["fold", "trains"]
# define: ten_steps, on one process
def ten_steps(break_after=None, keep_state=True):
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(10):
        if step == break_after:
            state = optimizer.state_dict()
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            if keep_state:
                optimizer.load_state_dict(state)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return list(net.parameters())

# %%
unbroken = ten_steps()
for keep_state in [True, False]:
    resumed = ten_steps(break_after=5, keep_state=keep_state)
    same = all(map(torch.equal, resumed, unbroken))
    print(f"the optimizer's state kept: {keep_state}, as if unbroken: {same}")

# %% [markdown]
# **Save the optimizer's state too.**
#
# ## Half the bytes
#
# Can gradients be sent as bfloat16? It has the exponent of float32, and 8 bits of precision instead
# of 24. The messages are added up in bfloat16, too. Our `DDP` calls `send` for each complete
# bucket. At the end it waits for each message in `self.sent`, and copies the means into the
# gradients, which are float32 still. So only `send` changes:

# %%
class BFloat16(DDP):
    def send(self, bucket):
        buffer = flatten(bucket) / dist.get_world_size()
        buffer = buffer.bfloat16()  # 2 bytes a number
        work = dist.all_reduce(buffer, async_op=True)
        self.sent.append((buffer, work))

# %% [markdown]
# (For PyTorch's DDP: `bf16_compress_hook` in
# `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.) LeNet trains forty steps on ten
# patterns under noise. **Predict:** what changes its accuracy more, the type of the messages or the
# seed?

# %% tags=["fold", "trains"]
# define: accuracy_after_40_steps
def accuracy_after_40_steps(wrap, seed):
    torch.manual_seed(seed)
    model = wrap(lenet())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    images, labels = make_data(40 * 64, seed)
    for x_batch, y_batch in zip(images.split(64), labels.split(64)):
        optimizer.zero_grad()
        F.cross_entropy(model(own_part(x_batch)), own_part(y_batch)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    test_images, test_labels = make_data(500, 100)
    with torch.no_grad():
        return (model(test_images).argmax(1) == test_labels).double().mean().item()

# %% tags=["trains", "measured", "few:range(3)=>range(2)"]
print("seed  float32  bfloat16")
by_type = []
for seed in range(3):
    full = ranks(accuracy_after_40_steps, DDP, seed)[0]
    half = ranks(accuracy_after_40_steps, BFloat16, seed)[0]
    by_type.append((full, half))
    print(f"{seed:4}  {full:7.1%}  {half:8.1%}")

# %% tags=["fold", "measured"]
# check: half the bytes; one step's means are nearly float32's; the type changes less than the seed
gaps_of_type = [abs(full - half) for full, half in by_type]
accuracies = [full for full, half in by_type]
gap_of_seeds = max(accuracies) - min(accuracies)
print(f"bfloat16 in place of float32: at most {100 * max(gaps_of_type):.1f} points; "
      f"another seed: up to {100 * gap_of_seeds:.1f} points")
assert max(gaps_of_type) < gap_of_seeds


def bytes_sent(wrap):
    model = wrap(lenet())
    model(torch.zeros(2, 1, 28, 28)).sum().backward()
    found = sum(buffer.nbytes for buffer, work in model.sent)
    model.finish_gradient_synchronization()
    return found


def means_of_one_step(wrap):
    torch.manual_seed(0)
    model = wrap(lenet())
    images, labels = make_data(64, 1)
    F.cross_entropy(model(own_part(images)), own_part(labels)).backward()
    model.finish_gradient_synchronization()
    return [p.grad for p in model.parameters()]


assert ranks(bytes_sent, DDP)[0] == 2 * ranks(bytes_sent, BFloat16)[0]
full, _ = ranks(means_of_one_step, DDP)
half, other_half = ranks(means_of_one_step, BFloat16)
assert largest_difference(half, other_half) == 0, "both ranks have the same means"
assert 0 < largest_difference(half, full) < 0.02, "8 bits of precision: some 0.4 % each time"

# %% [markdown]
# The seed. So bfloat16 is good enough here, in three short runs of a small network.
#
# ## Freed when it is dropped
#
# You run a cell twice that makes a model. Is the first model freed? The hook of chapter 14's
# `SmallDDP` is a method, and that closes a ring: parameter → hook → method → object → parameter.
# Part of it lies in C++, where Python's garbage collector can't follow. A *weak* reference finds a
# method as long as its object is there, and doesn't keep it:

# %%
def set_weak_hook(p, method):
    weak = weakref.WeakMethod(method)

    def call_if_alive(p):
        found = weak()  # the method, or None if its object is gone
        if found is not None:
            found(p)

    p.register_post_accumulate_grad_hook(call_if_alive)

# %% tags=["fold"]
# define: a wrapper with each kind of hook; how many of ten networks are in memory afterwards
class StrongHook(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            self.set_hook(p)

    def set_hook(self, p):
        p.register_post_accumulate_grad_hook(self.mark_ready)

    def mark_ready(self, p):
        pass


class WeakHook(StrongHook):
    def set_hook(self, p):
        set_weak_hook(p, self.mark_ready)


def still_alive(wrap):
    networks = []
    for _ in range(10):
        model = wrap(nn.Linear(100, 100))
        networks.append(weakref.ref(model.module))
        del model
    gc.collect()
    alive = 0
    for network in networks:
        if network() is not None:
            alive += 1
    return alive

# %%
for wrap in [StrongHook, WeakHook, DDP]:
    on_rank_0, on_rank_1 = ranks(still_alive, wrap)
    print(f"{wrap.__name__}: of ten that were dropped {on_rank_0} are still in memory")

# %% tags=["fold"]
# check: these numbers; a weak hook is called, once for each parameter, while its object is there
assert ranks(still_alive, StrongHook) == [10, 10]
assert ranks(still_alive, WeakHook) == [0, 0]
assert ranks(still_alive, DDP) == [0, 0]


class Counts(WeakHook):
    calls = 0

    def mark_ready(self, p):
        self.calls += 1


model = Counts(nn.Linear(100, 100))
model.module(torch.ones(1, 100)).sum().backward()
assert model.calls == 2, "one for each parameter"

# %% [markdown]
# So ours sets weak hooks.
#
# ## What ours can't notice
#
# Where does our `DDP` differ from PyTorch's? `tests/fixtures/ddp_behaviours.py` begins with a list,
# and runs more than a hundred cases.
#
# - Much gives the same gradients as PyTorch's with `find_unused_parameters=True` and
#   `forward_sync_buffers=False`.
# - Many mistakes ours refuses, by an error that says what to do instead, as in case 3.
# - A few things only ours gets right. If you call `model.module(x)` in place of `model(x)`, it
#   averages the gradients. PyTorch's sends nothing then, and raises no error.
#
# And what ours can't notice:
#
# | mistake | what happens |
# | --- | --- |
# | one rank alone loads weights, or changes them by hand | replicas stay apart |
# | one rank makes a step more (case 5) | it waits |
# | gradients by `torch.autograd.grad` in place of `backward()` | each rank has its own |
# | BatchNorm's running statistics | each rank has its own |
# | `GradScaler.unscale_`, used with float16, before the synchronization | ranks may disagree |
# | messages of your own before the synchronization | ranks may disagree |
#
# ## Summary
#
# (-: not all ranks finish. *One process* is a comparison with one that has the whole batch.)
#
# | mistake | replicas | what tells you | instead |
# | --- | --- | --- | --- |
# | 1. a loss without gradient | equal | weights that don't move | another loss |
# | 2. means of unequal shards | equal | one process | sums times $k/n$ |
# | 3. clipping too early | equal | one process; with ours an error | average, then clip |
# | 4. unused on one rank (PyTorch's) | - | one waits, one fails | `find_unused_parameters=True` |
# | 4. messages in another order | unequal, or - | comparing replicas | one order for all |
# | 5. uneven inputs | - | one rank waits | the same number of steps; `join` |
# | 6. beginning apart | unequal | comparing replicas | broadcast |
# | 7. no `set_epoch` | equal | printing the order | `set_epoch(epoch)` |
# | 8. weights alone saved | equal | a run without a break | save the optimizer's state |
#
# **Equal replicas are no proof.** Compare with one process, and with a loss that moves the weights.
