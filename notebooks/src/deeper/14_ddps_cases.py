# %% [markdown]
# # Deeper · DDP's cases
#
# What do users of DDP meet beside right numbers? Mistakes that leave all replicas equal and wrong,
# ranks that wait for ever, and calls that do something else than they seem to.
#
# ## What you'll do
#
# Spring eight traps, in ours and in PyTorch's DDP. Send half the bytes. See a DDP freed. Then read
# how ours behaves in more than eighty cases.
#
# ## What you'll learn
#
# - which mistakes a comparison of replicas can't see;
# - what happens when ranks disagree about what to send;
# - where `DDP` of chapter 14 equals PyTorch's, where it raises an error, and what it can't notice.
#
# ## What you need
#
# Chapter 14 and PyTorch. Reading takes {reading time}, running about a minute on two cores.

# %% tags=["torch"]
import gc
import sys
import weakref
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 14's files are
from ddp_train import DDP, flatten, lenet, make_data
from ranks import ranks

# %% [markdown]
# A small network, the same on all ranks, and a batch of 12, of which each rank takes its part:

# %%
def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


torch.manual_seed(1)
x = torch.randn(12, 4).double()
y = torch.arange(12) % 3


def own_part(array):
    return array.tensor_split(dist.get_world_size())[dist.get_rank()]


def own_gradients(net):
    return [p.grad for p in net.parameters()]

# %% [markdown]
# ## 1. Replicas that start apart
#
# Averaged gradients don't bring replicas together: with plain SGD all make the same step. Here each
# rank draws its own weights, and averages without DDP's broadcast. **Predict:** how far apart are
# two weights after five steps?

# %% tags=["trains"]
def gaps(broadcast):
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(4, 3).double()
    if broadcast:
        net = DDP(net).module
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    weights = []
    for _ in range(6):
        weights.append(net.weight[0, 0].item())
        optimizer.zero_grad()
        gradients = torch.autograd.grad(F.cross_entropy(net(own_part(x)), own_part(y)),
                                        list(net.parameters()))
        for p, gradient in zip(net.parameters(), gradients):
            dist.all_reduce(gradient)
            p.grad = gradient / dist.get_world_size()
        optimizer.step()
    return weights


for broadcast in [False, True]:
    first, second = ranks(gaps, broadcast)
    print(f"broadcast {broadcast}: at first {first[0] - second[0]:.4f} apart, "
          f"after five steps {first[5] - second[5]:.4f}")

# %% tags=["fold"]
# check: without the broadcast the gap is there, and stays; with it there is none
first, second = ranks(gaps, False)
assert abs(first[0] - second[0]) > 1e-3
assert abs((first[0] - second[0]) - (first[5] - second[5])) < 1e-12
first, second = ranks(gaps, True)
assert first == second

# %% [markdown]
# ## 2. A loss that can't tell
#
# PyTorch's example `ddp-tutorial-series` (`multigpu.py` at commit 1e81da3 of pytorch/examples)
# takes `cross_entropy` of a network with *one* output. Softmax of a single number is always 1, so
# the gradient is zero. **Predict:** two ranks train on different data and send nothing. With which
# loss are their weights equal?

# %%
def silent(loss):
    weight = nn.Parameter(torch.zeros(20, 1))
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        value = loss(torch.rand(8, 20) @ weight, torch.rand(8, 1))
        (gradient,) = torch.autograd.grad(value, weight)
        weight.data -= 0.1 * gradient
    return weight.detach()


for loss in [F.cross_entropy, F.mse_loss]:
    first, second = ranks(silent, loss)
    print(loss.__name__, "- weights equal:", torch.equal(first, second))

# %% [markdown]
# A test of data parallelism needs gradients that differ from rank to rank.
#
# ## 3. Sum and mean
#
# DDP divides the sum of the gradients by the number of ranks, never by the number of examples.
# Which of these give a multiple of the gradient of the mean over all eight, and which multiple?

# %%
def reduced(sizes, factors):
    rank = dist.get_rank()
    model = DDP(small_net())
    x_shard = x[:8].split(sizes)[rank]
    y_shard = y[:8].split(sizes)[rank]
    loss = F.cross_entropy(model(x_shard), y_shard, reduction="sum") * factors[rank]
    loss.backward()
    model.finish_gradient_synchronization()
    return torch.cat([gradient.flatten() for gradient in own_gradients(model)])


net = small_net()
F.cross_entropy(net(x[:8]), y[:8]).backward()
right = torch.cat([gradient.flatten() for gradient in own_gradients(net)])

CASES = {"means of 4 and 4": ([4, 4], [1 / 4, 1 / 4]),
         "sums of 4 and 4": ([4, 4], [1, 1]),
         "means of 5 and 3": ([5, 3], [1 / 5, 1 / 3]),
         "sums of 5 and 3, times 2/8": ([5, 3], [2 / 8, 2 / 8])}
for name, (sizes, factors) in CASES.items():
    found, other = ranks(reduced, sizes, factors)
    assert torch.equal(found, other), "the replicas agree, right or wrong"
    multiple = (found @ right / (right @ right)).item()
    if largest_difference(found, multiple * right) < 1e-12:
        print(f"{name:27} {multiple:.2f} times the mean")
    else:
        print(f"{name:27} another direction")

# %% [markdown]
# **Means of unequal shards point in another direction, and all replicas agree on it.** Weighted by
# $k/n$, ranks over examples, the sum is right (chapter 12).
#
# ## 4. A sampler without set_epoch
#
# `DistributedSampler` gives each rank its share of one random order, which it draws from a seed
# that all ranks share.

# %%
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(8), 2, rank=1, shuffle=True)
print("two epochs:", list(sampler), list(sampler))
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(f"after set_epoch({epoch}):", list(sampler))

# %% [markdown]
# Without `set_epoch` every epoch has the same order, and rank 1 never sees the other half.
#
# ## 5. A parameter unused on one rank
#
# Rank 1 leaves out the first layer, as a network with branches might. **Predict** what ours does,
# PyTorch's, and PyTorch's with `find_unused_parameters=True`.

# %%
class Branch(nn.Module):
    def __init__(self, left_out):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.left_out = left_out

    def forward(self, x):
        if dist.get_rank() == 0:
            return self.second(self.first(x))
        if self.left_out == "first":
            return self.second(x)
        return self.first(x)

# %% tags=["trains"]
def torchs_default(net):
    return DistributedDataParallel(net)


def torchs_that_finds(net):
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
    """"finished", or the first sentence of the error, without paths and ports."""
    try:
        function(*given)
    except Exception as error:
        text = str(error)
        return text.split(".")[0] if text[0].isalpha() else type(error).__name__
    return "finished"


for wrap in [DDP, torchs_that_finds, torchs_default]:
    for rank, text in enumerate(ranks(ending, branch_steps, wrap, "first")):
        print(f"{wrap.__name__}, rank {rank}: {text}")

# %% [markdown]
# By default PyTorch's rank 1 raises an error in its next forward pass, while rank 0 still waits in
# the backward pass before, until rank 1 has ended. With `find_unused_parameters=True` it counts a
# missing gradient as zero, like ours. If rank 1 leaves out the *second* layer, whose bucket comes
# first, the first layer's bucket must wait; sent at once it would be added to rank 0's second.

# %% tags=["fold"]
# check: ours ends with the weights of PyTorch's, whichever layer is left out, in buckets of one
def buckets_of_one(net):
    return DDP(net, 1e-6)


for left_out in ("first", "second"):
    theirs = ranks(branch_steps, torchs_that_finds, left_out)
    for wrap in (DDP, buckets_of_one):
        assert largest_difference(ranks(branch_steps, wrap, left_out), theirs[0]) < 1e-12

# %% [markdown]
# ## 6. Uneven inputs
#
# Rank 1 has a batch less than rank 0. In the last step it doesn't come to the all-reduce. For
# PyTorch's DDP there is `join`: a rank that has no more data answers the others with zeros.

# %% tags=["trains"]
def uneven_steps(join):
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with model.join() if join else nullcontext():
        for _ in range(3 - dist.get_rank()):
            optimizer.zero_grad()
            F.cross_entropy(model(own_part(x)), own_part(y)).backward()
            optimizer.step()
    weight = model.module[0].weight
    return weight.detach().clone(), optimizer.state[weight]["momentum_buffer"]


(weight0, momentum0), (weight1, momentum1) = ranks(uneven_steps, True)
print("with join: weights equal:", torch.equal(weight0, weight1))
print("with join: momentum equal:", torch.equal(momentum0, momentum1))
for rank, text in enumerate(ranks(ending, uneven_steps, False)):
    print(f"without, rank {rank}: {text}")

# %% [markdown]
# At the end the rank that had no more data gets the weights, and not the optimizer's state. (By
# default the sum is still divided by 2, `divide_by_initial_world_size`, so the last gradient is
# half as large.) Without `join` rank 0 waits until rank 1 has ended, or until a deadline: half an
# hour with gloo and ten minutes with NCCL (`default_pg_timeout`, `default_pg_nccl_timeout`). Ours
# has no `join`: give all ranks as many steps.
#
# ## 7. Clipping too early
#
# Clipping by the norm isn't linear: the mean of clipped gradients is not the clipped mean.
# PyTorch's DDP averages within `backward()`, so there clipping comes after by itself. **Predict:**
# can you see the mistake by comparing replicas?

# %%
def clipped(before):
    net = small_net()
    F.cross_entropy(net(own_part(x)), own_part(y)).backward()
    if before:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    if not before:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return own_gradients(net)


net = small_net()
F.cross_entropy(net(x), y).backward()
nn.utils.clip_grad_norm_(net.parameters(), 0.1)
for before in [True, False]:
    found = ranks(clipped, before)
    print("clipped before:" if before else "clipped after: ",
          f"{float(largest_difference(found[0], found[1])):.2f} between the replicas,",
          f"{float(largest_difference(found, own_gradients(net))):.2f} from the whole batch")

# %% [markdown]
# `DDP` raises an error where gradients are changed before `finish_gradient_synchronization()`.
#
# ## 8. A checkpoint without the optimizer's state
#
# Momentum is state too. Ten steps without a break, against five, a new optimizer, and five more.

# %% tags=["trains"]
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


unbroken = ten_steps()
for keep_state in [True, False]:
    resumed = ten_steps(break_after=5, keep_state=keep_state)
    same = all(map(torch.equal, resumed, unbroken))
    print("with its state:   " if keep_state else "without its state:", "as if unbroken:", same)

# %% [markdown]
# Under DDP one rank writes the checkpoint, from `model.module`: the wrapper's own `state_dict` has
# `module.` before every name.
#
# ## Half the bytes
#
# Gradients can be sent as bfloat16: 8 bits of exponent as in float32, and 8 bits of precision
# instead of 24. The messages are added up in bfloat16, too. (PyTorch's DDP does this with
# `register_comm_hook(None, bf16_compress_hook)`, from
# `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.) What does it cost LeNet, in its
# first forty steps on noisy patterns?

# %%
class BFloat16(DDP):
    def send(self, bucket):
        buffer = (flatten(bucket) / dist.get_world_size()).bfloat16()
        self.sent.append((buffer, dist.all_reduce(buffer, async_op=True)))

# %% tags=["trains", "measured", "few:range(3)=>range(1)"]
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


for wrap in [DDP, BFloat16]:
    for seed in range(3):
        print(f"{wrap.__name__:8} seed {seed}: "
              f"{ranks(accuracy_after_40_steps, wrap, seed)[0]:.1%} right")

# %% [markdown]
# Compare the rows of one seed, and then the seeds of one kind.
#
# ## Freed when it is dropped
#
# A hook that is a method keeps its object alive: parameter, hook, method, object, parameter. Part
# of this ring lies in C++, where Python's garbage collector can't follow it. So `DDP` sets hooks
# that hold a weak reference:

# %%
class Kept(nn.Module):
    """A wrapper whose hook is a plain method, as many are written."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.mark_ready)

    def mark_ready(self, p):
        pass


def still_alive(wrap):
    found = []
    for _ in range(10):
        model = wrap(nn.Linear(100, 100))
        found.append(weakref.ref(model.module))
        del model
    gc.collect()
    return sum(reference() is not None for reference in found)


for wrap in [Kept, DDP]:
    print(f"{wrap.__name__}: of ten networks that were dropped", ranks(still_alive, wrap)[0],
          "are still in memory")

# %% tags=["fold"]
# check: these numbers
assert ranks(still_alive, Kept) == [10, 10]
assert ranks(still_alive, DDP) == [0, 0]

# %% [markdown]
# ## Behaviours, one by one
#
# `tests/fixtures/ddp_behaviours.py` runs each of these on two and on three ranks. Most are tested
# in PyTorch's own suite, too.
#
# | equal to PyTorch's (with `find_unused_parameters=True`, `forward_sync_buffers=False`) |
# | --- |
# | training with SGD, Adam, AdamW, RMSprop, LBFGS; optimizers made before; clipping after |
# | outputs as tuple or dict, keyword arguments, outputs that the loss leaves out, unused passes |
# | parameters unused on all ranks, on one, or in some steps; a gradient left from before |
# | tied weights; layers called twice; two models in one loss |
# | accumulation with `no_sync`, after a synchronised pass, with `zero_grad` of both kinds |
# | frozen before or after wrapping; `train()`, `eval()`, `no_grad`, `inference_mode` |
# | float64, float16, bfloat16, complex64; buffers of five types; channels-last; empty parameters |
# | names in `state_dict()`; saving and loading; checkpointing, not reentrant; autocast; `compile` |
# | hooks on modules and on gradients |
#
# | right, where PyTorch's is otherwise |
# | --- |
# | `model.module(x)`: averaged too; PyTorch's sends nothing, and says nothing |
# | a backward pass through `autograd.grad(create_graph=True)`; PyTorch's isn't averaged |
# | nothing to train: does nothing; PyTorch's raises |
# | wrapped anew, as when a cell runs twice: the old one is freed, one message a bucket |
#
# | refused, with the reason and the way out |
# | --- |
# | a step, a forward or second backward pass, or `step()` in a hook, before the synchronization |
# | gradients clipped, replaced, cleared, or changed by a later hook before it |
# | parameters unfrozen, added or replaced after wrapping; `functional_call` on the wrapper |
# | sparse gradients; `backward(create_graph=True)`; a reentrant checkpoint of a layer used twice |
# | copying, pickling or saving the wrapper; a DDP within a DDP; two DDPs of one module |
# | modules that differ between ranks in names, order, shapes, types, freezing; bucket sizes |
# | lazy or `meta` parameters; PyTorch's options, communication hooks, `join` |
#
# | not to be noticed, so it is in the docstring's first paragraph |
# | --- |
# | what only one rank does: `load_state_dict`, weights changed by hand, one step more (it waits) |
# | gradients from `torch.autograd.grad`: the rank's own |
# | buffers after the start: the rank's own |
# | ranks with more examples: they don't count more |
# | `GradScaler.unscale_` before the synchronization |
# | messages of your own between a backward pass and its end |

# %% [markdown]
# ## Summary
#
# - Replicas can agree and be wrong: with a loss that has no gradient, with means of unequal shards,
#   with gradients clipped before they are averaged. Compare with one process.
# - Ranks that disagree about what to send wait, fail, or add up what doesn't belong together.
# - A class should raise an error where it can notice a mistake, and say where it can't.
