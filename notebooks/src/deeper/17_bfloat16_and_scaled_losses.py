# %% [markdown]
# # Deeper · bfloat16 and scaled losses
#
# In bfloat16, where a number has 16 bits, the activations of chapter 17 would take as little as
# half of their memory. *Which parts of a training may be in 16 bits?* Where one may not, training
# goes on without an error, and learns less or nothing. So we try the parts on toys of a few
# numbers, in which every bit can be followed.
#
# ![The bits of three formats. float32: one for the sign, 8 for the exponent, 23 for the mantissa.
# bfloat16: 1, 8 and 7; float32's range, few digits. float16: 1, 5 and 10; more digits, a small
# range.](../src/drawings/three_formats.svg)
#
# > **What you'll do:** lose updates in bfloat16 and gradients in float16, cure both by hand, and
# > find the same by PyTorch's `GradScaler`.
# >
# > **What you'll learn:** why weights have a master in float32; why a loss is scaled; two mistakes
# > with scales that raise no error.
# >
# > **What you need:** chapters 16 and 17, no GPU, and PyTorch 2.13 or newer.
# > Reading takes {reading time}, running about 10 seconds.

# %% tags=["torch"]
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

sys.path.insert(0, "..")  # where chapter 14's ranks.py is
from ranks import ranks

# %% [markdown]
# ## What 16 bits can't hold
#
# A float has a sign, an **exponent** and a **mantissa**. The exponent decides how large and how
# small numbers can be, the mantissa how close together they are. There are two ways to save half of
# float32's bits. *bfloat16* keeps the whole exponent, and *float16* keeps more of the mantissa:

# %%
formats = [torch.float32, torch.bfloat16, torch.float16]
for dtype in formats:
    info = torch.finfo(dtype)
    print(f"{dtype}: largest {info.max:.1e}, first number after 1 is 1 + 1/{1 / info.eps:.0f}")

# %% [markdown]
# The leading bit of the mantissa isn't stored, because it is 1 in all but the smallest numbers. So
# bfloat16 counts with 8 bits, and float16 with 11. What becomes of three numbers in each format?

# %%
for dtype in formats:
    for number in [257.0, 70_000.0, 1e-8]:
        stored = torch.tensor(number).to(dtype)
        print(f"{dtype}: {number:,} becomes {stored.item():,.4g}")

# %% [markdown]
# float32 is right, as far as we print. bfloat16 has no 257, because between 256 and 512 its numbers
# are 2 apart; its other two are right to two digits. float16 has 257, but 70,000 is too large and
# becomes infinity, and 1e-8 is too small and becomes 0. So bfloat16
# lacks *digits*, and float16 lacks *range*. Each leads to a failure of its own.
#
# ## An update that never moves a weight
#
# Ten weights in bfloat16 begin with 1, 1/2, 1/4, …, 1/512. Each has the gradient −1 at every step,
# and the learning rate is 0.001. So after 100 steps each should have grown by 0.1. **Predict:**
# which weights haven't moved at all? (Between 1 and 2 the numbers of bfloat16 are 1/128 apart,
# between 1/2 and 1 they are 1/256 apart, and so on. A sum becomes the nearest of them.)

# %% tags=["predict"]
start = torch.tensor([2.0 ** -i for i in range(10)])
gradient = torch.full((10,), -1.0, dtype=torch.bfloat16)
lr = 0.001

weight = start.bfloat16()
for step in range(100):
    weight -= lr * gradient
for before, after in zip(start.tolist(), weight.tolist()):
    print(f"from {before:.4f} to {after:.4f}, should be {before + 0.1:.4f}")
only_bfloat16 = weight

# %% [markdown]
# <details><summary>What came out</summary>
#
# 1 and 1/2 haven't moved. At 1/2 the next number is 1/256 away, and 0.001 is less than half of
# that, so the sum is rounded back to 1/2, a hundred times.
#
# </details>
#
# The others are wrong, too. The weight that begins with 1/4 lies where numbers are 1/512 apart, and
# 0.001 is a little more than half of that. So each step is nearly twice as long as it should be,
# and the weight ends at 0.4453 instead of 0.35. All updates
# are right. But bfloat16 has no number close enough to the sum of weight and update.
#
# ## Master weights
#
# The cure is a second copy of each weight, in float32: the **master weight**. The network computes
# with a bfloat16 copy, and its gradient comes in bfloat16. But the update is added to the master,
# where many small updates add up until the copy moves, too:

# %%
master = start.clone()  # float32
for step in range(100):
    weight = master.bfloat16()  # the network computes with this
    # here would be the forward and the backward pass
    master -= lr * gradient.float()
weight = master.bfloat16()
for before, after in zip(start.tolist(), weight.tolist()):
    print(f"from {before:.4f} to {after:.4f}, should be {before + 0.1:.4f}")

should_be = start + 0.1
assert torch.allclose(master, should_be, atol=1e-5)
assert torch.allclose(weight.float(), should_be, rtol=1 / 256)  # half a step of bfloat16
assert torch.equal(only_bfloat16[:2].float(), start[:2])

# %% [markdown]
# Now all ten weights are right, up to bfloat16's rounding. So **weights that are updated stay in
# float32**, and for the optimizer's state it is the safe choice. The copies that compute and the
# gradients may have 16 bits. What does that save? With Adam a parameter needs 2 bytes for the copy,
# 2 for its gradient, 4 for the master and 8 for the two means. These are 16 bytes, as many as in
# float32 (S. Rajbhandari et al., 2020, arXiv:1910.02054, section 3.1, count so). So weights and
# state don't shrink. What can shrink is what autograd keeps for the backward pass, and what is
# sent, if gradients are sent in 16 bits (deeper: DDP's cases).
#
# ## Gradients that vanish
#
# float16's smallest number above 0 is $2^{-24}$. Gradients can be smaller, for example because a
# mean over many tokens divides each of them. Here 24 inputs are 1, 1/2, 1/4, …, and the sum is
# divided by 1,024. So the gradients are $2^{-10}$, $2^{-11}$, …, $2^{-33}$. Weights are float32
# masters. `half()` makes the float16 copies, and autograd takes the gradient back through it.
# **Predict:** how many of the 24 gradients are 0?

# %% tags=["predict"]
x = torch.tensor([2.0 ** -i for i in range(24)]).half()


def loss_of(weight):
    product = weight.half() * x  # in float16
    return product.float().sum() / 1024  # in float32


weight = torch.ones(24, requires_grad=True)
loss_of(weight).backward()
true_gradient = x.float() / 1024
print("gradients that are 0:", (weight.grad == 0).sum().item(), "of", len(x))
assert (true_gradient > 0).all()
assert torch.equal(weight.grad[:15], true_gradient[:15])

# %% [markdown]
# <details><summary>What came out</summary>
#
# Nine have vanished, from $2^{-25}$ on. That one lies halfway between $2^{-24}$ and 0, and becomes
# zero. Their weights would never be trained.
#
# </details>
#
# At the upper end there is room, because $2^{15}$ still fits. So the loss is multiplied by a
# number, the **scale**. By the chain rule all gradients are multiplied by it, too, and they are
# divided by it afterwards, in float32, where nothing vanishes. That is called **loss scaling**
# (P. Micikevicius et al., 2018, arXiv:1710.03740, who also keep master weights).
#
# ![Gradients from 2 to the power of −33 up to −10, as 24 dots, and the range of float16. As they
# are nine lie below it and vanish. With the loss times 2 to the 12 all are within. With 2 to the 27
# two lie above it and overflow.](../src/drawings/scaled_range.svg)

# %%
for scale in [2.0**12, 2.0**27]:
    weight.grad = None
    (scale * loss_of(weight)).backward()
    print("0:", (weight.grad == 0).sum().item(), " infinite:", weight.grad.isinf().sum().item())
    if scale == 2.0**12:
        assert torch.equal(weight.grad / scale, true_gradient)

# %% [markdown]
# With $2^{12}$ nothing is lost, and all 24 gradients are exact, because ours are powers of two.
# (Others would lose digits where the scaled gradient is below $2^{-14}$.) But $2^{27}$ is too much.
# Here even all gradients become infinite, and not only the picture's two, because the gradient of
# the product, $2^{27}/1024$, is in float16 as well.
#
# ## A scale that finds itself
#
# Gradients change while a network trains, so a fixed scale, which often works, has to be found for
# each network and may cease to fit. But too large a one shows itself by an infinity or a NaN. So we
# begin high. If a gradient isn't finite, the step is *skipped* and the scale halved. After some
# good steps in a row, here three, it is doubled.
#
# **Predict:** the scale begins with $2^{27}$ = 134,217,728. Any scale from $2^9$ to $2^{25}$
# is good.
# But at step 4 gradients are four times as large. Which of twelve steps are skipped?

# %% tags=["predict"]
weight = torch.ones(24, requires_grad=True)
sizes = [1, 1, 1, 1, 4, 1, 1, 1, 1, 1, 1, 1]  # of the gradients, step by step
scale = 2.0**27
good_steps = 0
scales = []
for step in range(12):
    scales.append(scale)
    weight.grad = None
    loss = sizes[step] * loss_of(weight)
    (scale * loss).backward()
    if weight.grad.isfinite().all():
        weight.data -= 0.5 * (weight.grad / scale)  # unscaled, in float32
        good_steps += 1
        what = "good"
    else:
        scale /= 2
        good_steps = 0
        what = "skipped"
    if good_steps == 3:
        scale *= 2
        good_steps = 0
    print(f"step {step}: scale {scales[-1]:,.0f}, {what}")
by_hand = weight.detach()

# %% [markdown]
# <details><summary>What came out</summary>
#
# Steps 0 and 1 are skipped, then $2^{25}$ is good, until the large gradients of step 4 are too much
# for it. With $2^{24}$ three good steps follow, with $2^{25}$ three more. Then the scale is doubled
# once too often, and step 11 is skipped.
#
# </details>
#
# Now and then a step is lost, and so the scale stays as large as it can be. PyTorch's class for
# this is `GradScaler`. Its `scale` multiplies the loss, `step` unscales the gradients and either
# calls the optimizer or doesn't, and `update` changes the scale:

# %%
weight = torch.ones(24, requires_grad=True)
sgd = torch.optim.SGD([weight], lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**27, growth_interval=3)
scales_by_pytorch = []
for step in range(12):
    scales_by_pytorch.append(scaler.get_scale())
    sgd.zero_grad()
    loss = sizes[step] * loss_of(weight)
    scaler.scale(loss).backward()
    scaler.step(sgd)
    scaler.update()
print("equal scales: ", scales_by_pytorch == scales)
print("equal weights:", torch.equal(weight, by_hand))
assert scales_by_pytorch == scales
assert torch.equal(weight, by_hand)

# %% [markdown]
# The scales are equal and the weights are, too, bit for bit. By default the first scale is
# $2^{16}$, and it is doubled after 2,000 good steps (`torch/amp/grad_scaler.py`). bfloat16 has the
# exponents of float32, so it needs no scale (D. Kalamkar et al., 2019, arXiv:1905.12322).
#
# ## Autocast: which operations are in 16 bits?
#
# Nobody writes `half()` before each operation. Inside `torch.autocast` PyTorch selects the dtype
# for each one. The weights are left in float32, so they are the masters, and copies in 16 bits
# are made where an operation wants them. Only dtypes are printed here, no numbers:

# %%
net = nn.Linear(4, 4)
inputs = torch.ones(2, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    outputs = net(inputs)
    loss = F.cross_entropy(outputs, torch.tensor([0, 1]))
    dtypes = {
        "the weight": net.weight.dtype,
        "linear layer": outputs.dtype,
        "matrix product": (inputs @ inputs.t()).dtype,
        "GELU of the linear layer": F.gelu(outputs).dtype,
        "GELU of the inputs": F.gelu(inputs).dtype,
        "softmax of the linear layer": outputs.softmax(dim=1).dtype,
        "linear layer plus inputs": (outputs + inputs).dtype,
        "cross-entropy": loss.dtype,
    }
loss.backward()  # outside: the backward pass takes the dtypes of the forward pass
dtypes["the weight's gradient"] = net.weight.grad.dtype
for name, dtype in dtypes.items():
    print(f"{name:28} {dtype}")

# %% [markdown]
# There are three kinds of operations. Matrix products, where most of the work is, come out in
# bfloat16 even if their inputs are float32. The loss comes out in float32. Others, such as GELU,
# take the dtype of their inputs, and if these differ, float32.
#
# On GPUs the lists are longer. There `softmax`, `sum`, `exp` and `layer_norm` come out in float32,
# too (`AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` in `ATen/autocast_mode.h`), because they
# add up many numbers or have a large range. On a CPU, as you see, softmax follows its input. So a
# dtype that you have seen on a CPU needn't be the one on a GPU.
#
# ## Gradients that are added up
#
# In gradient accumulation (chapter 14) the gradients of several parts of a batch add up in `.grad`.
# By default a gradient has the dtype of its weight (`grad_dtype` changes that). Here 300 parts have
# the gradient 1 each. What is their sum, if the weight is in float32, and if it is in bfloat16?
# Does a scale help?

# %%
for dtype in [torch.float32, torch.bfloat16]:
    for scale in [1.0, 1024.0]:
        weight = torch.ones(2, dtype=dtype, requires_grad=True)
        for part in range(300):
            (scale * weight.sum()).backward()
        total = weight.grad.float() / scale
        print(f"{dtype}, scale {scale:.0f}: {total.tolist()}")

# %% [markdown]
# It is 300 in float32. In bfloat16 the sum stops at 256, because there is no 257. A scale doesn't
# help: it moves the range, and the number of bits stays.
#
# So what adds up many numbers should be in float32. With autocast accumulated gradients are,
# because the weights are.
#
# ## Clipped before unscaling
#
# Let us put accumulation, scale and clipping together. The scale must be the same for all parts of
# a batch, so `step` and `update` come once, after the last part. Clipping limits the gradients'
# norm, here to 1 (chapter 07). But after `backward()` the gradients are still scaled. So
# `scaler.unscale_` must come before it; `step` then knows that it needn't unscale again.
#
# Both parts together have the gradient (3, 4), with the norm 5. So clipping should leave (0.6,
# 0.8). **Predict:** how far do the weights move if we forget `unscale_`?

# %% tags=["predict"]
def clipped_step(with_unscale):
    weight = torch.zeros(2, requires_grad=True)
    sgd = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for part in [torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0])]:
        loss = (weight.half() * part.half()).float().sum() / 2  # half of the batch
        scaler.scale(loss).backward()
    if with_unscale:
        scaler.unscale_(sgd)
    nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    scaler.step(sgd)
    scaler.update()
    return weight.detach()


for with_unscale in [True, False]:
    moved = clipped_step(with_unscale)
    print(f"unscale_: {with_unscale}, moved by {moved[0]:.5f} and {moved[1]:.5f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# They move by a 1,024th of what they should. The scaled norm is 5,120, so the gradients are clipped
# to the norm 1, and then `step` divides them by 1,024.
#
# </details>
#
# No error is raised. With SGD, training seems to go on, with a learning rate a thousand times too
# small, that changes whenever the scale does. Adam hides the mistake, except that every gradient is
# clipped.
#
# ## An infinity on one rank only
#
# Each rank has a scaler of its own, and the scalers send nothing. Is that enough? Our two ranks
# have a replica each of one weight, `shared`, whose gradients are averaged, and a weight `own` of
# which each rank has another one, as with shards (chapter 16). On rank 1 one of them gets a factor
# that is too large for float16. **Predict:** which rank skips its step if that is `shared`, and
# which if it is `own`?

# %% tags=["predict"]
def overflow_in(name, scaler_class):
    factor = {"shared": 1.0, "own": 1.0}
    if dist.get_rank() == 1:
        factor[name] = 100.0  # with the scale 102,400, and float16 ends at 65,504
    shared = torch.ones(1, requires_grad=True)
    own = torch.ones(1, requires_grad=True)
    sgd = torch.optim.SGD([shared, own], lr=0.25)
    scaler = scaler_class(device="cpu", init_scale=1024.0)
    loss = (shared.half() * factor["shared"] + own.half() * factor["own"]).float().sum()
    scaler.scale(loss).backward()
    dist.all_reduce(shared.grad)
    shared.grad /= 2
    scaler.step(sgd)
    scaler.update()
    return shared.item(), own.item(), scaler.get_scale()


for name in ["shared", "own"]:
    print("overflow on rank 1 in", name)
    found = ranks(overflow_in, name, torch.amp.GradScaler)
    for rank, (shared, own, scale) in enumerate(found):
        print(f"    rank {rank}: shared {shared}, own {own}, next scale {scale:.0f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# If it is in `shared`, both ranks skip, because an infinity stays one in a sum, so that both see
# it. If it is in `own`, only rank 1 skips. Now the replicas of `shared` are 0.75 and 1.
#
# </details>
#
# So in data parallelism the all-reduce of the gradients is enough. Where each rank has gradients
# that the others don't see, the replicas drift apart, without an error, and so do the scales: in
# the next step gradients that were multiplied by 1,024 and by 512 would be averaged. So the ranks
# must decide together. Each tells the others whether it has found an infinity, by an all-reduce of
# one number, whose largest value counts:

# %%
def decide_together(factor_on_1):
    factor = factor_on_1 if dist.get_rank() == 1 else 1.0
    shared = torch.ones(1, requires_grad=True)
    own = torch.ones(1, requires_grad=True)
    scale = 1024.0
    loss = (shared.half() + own.half() * factor).float().sum()
    (scale * loss).backward()
    dist.all_reduce(shared.grad)
    shared.grad /= 2
    overflow = torch.zeros(1)
    for p in [shared, own]:
        if not p.grad.isfinite().all():
            overflow.fill_(1)
    dist.all_reduce(overflow, op=dist.ReduceOp.MAX)  # the flag: 1 if any rank has found one
    if overflow == 1:
        scale /= 2
    else:
        for p in [shared, own]:
            p.data -= 0.25 * (p.grad / scale)
    return shared.item(), own.item(), scale


ours = ranks(decide_together, 100.0)
for rank, (shared, own, scale) in enumerate(ours):
    print(f"rank {rank}: shared {shared}, own {own}, next scale {scale:.0f}")
assert ours == [(1.0, 1.0, 512.0), (1.0, 1.0, 512.0)]
assert ranks(overflow_in, "own", ShardedGradScaler) == ours
assert ranks(decide_together, 1.0) == [(0.75, 0.75, 1024.0), (0.75, 0.75, 1024.0)]  # no overflow

# %% [markdown]
# Both skip, and both halve the scale. In PyTorch `ShardedGradScaler` has the same effect: it adds
# up the flags in `unscale_`, and skips unless the sum is 0
# (`torch/distributed/fsdp/sharded_grad_scaler.py`). It is for plain tensors. For `fully_shard`'s
# DTensors PyTorch's `GradScaler` does it by itself (`found_inf_reduce_handler` in
# `torch/distributed/tensor/_dispatch.py`).
#
# ## What it is worth on GPUs
#
# We have measured no speed, and a CPU would say little of a GPU's. By NVIDIA's data sheet an A100
# does at most 312 TFLOP/s in matrix products of bfloat16 or float16, 156 in TF32 (float32 numbers
# whose mantissa is cut to 10 bits), and 19.5 in float32. And where an operation only reads and
# writes memory, half the bytes are half the traffic. Memory for weights and state stays, as counted
# above. Activations take half, where they are kept in 16 bits.
#
# ## Summary
#
# | part of a training | in 16 bits? |
# | --- | --- |
# | matrix products (their inputs and outputs; the sums within are mostly float32) | yes |
# | the activations that autograd keeps for them | yes |
# | copies of weights that compute | yes |
# | gradients within the backward pass | yes; in float16 with a scaled loss |
# | weights that are updated | no |
# | the optimizer's state | float32 is the safe choice |
# | sums that outlive an operation: accumulated gradients, losses | no |
#
# - bfloat16 lacks digits: an update below half the distance to the next number is lost. Master
#   weights in float32 cure it.
# - float16 lacks range: small gradients vanish. A scaled loss cures it, and an infinity says when
#   the scale is too large.
# - Unscale before you clip. And where ranks have gradients of their own, they must skip together.
# - In your own program: `torch.autocast` with bfloat16. With float16 add a `GradScaler`.
#
# **Further reading.** P. Micikevicius et al., *Mixed Precision Training* (2018), arXiv:1710.03740.
# D. Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training* (2019), arXiv:1905.12322.
