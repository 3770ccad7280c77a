# %% [markdown]
# # Deeper · Costs on paper
#
# *What will a training cost, in operations, bytes and seconds, before anybody runs it?* Chapter 11
# took a few numbers as given: how many operations a network needs, and that a device reaches 40 %
# of its peak. Here we count the operations, see where such a share comes from, and compare what
# paper says with what was once measured.
#
# > **What you'll do:** count the operations of LeNet, of ResNet-18 and of a transformer's layer.
# > Turn a published number of tokens a second into a share of the peak. Say what a training needs
# > in seconds, bytes and days.
# >
# > **What you'll learn:** why a transformer takes 6 operations for each parameter and token, and
# > when that isn't all; what *model FLOPs utilization* (MFU) is; what 16 bits save and what they
# > don't; where paper was wrong.
# >
# > **What you need:** chapters 03 and 11. No GPU. Reading takes {reading time}, running a few
# > seconds.

# %%
from helpers.networks import hybrid_resnet18, lenet

import numpy as np
from mxnet import gluon, nd

# %% [markdown]
# ## Counting operations
#
# We begin with LeNet's first convolution, and one image of 28 × 28 pixels:

# %%
layer = gluon.nn.Conv2D(20, kernel_size=3)
layer.initialize()
output = layer(nd.zeros((1, 1, 28, 28)))
print("output:", output.shape, "weight:", layer.weight.shape)

# %% [markdown]
# One image gives 20 × 26 × 26 numbers. Each is a sum of 1 × 3 × 3 products, one for each weight of
# its channel. A multiplication and an addition are two operations (*FLOPs*, floating-point
# operations; FLOP/s are operations a second):

# %%
def operations_of(layer, output):
    """Of a forward pass of one image."""
    weights_each = int(np.prod(layer.weight.shape[1:]))  # the first axis is channels or units
    return 2 * output.size * weights_each


by_hand = 2 * (20 * 26 * 26) * (1 * 3 * 3)
print(f"{operations_of(layer, output):,} operations")
assert operations_of(layer, output) == by_hand

# %% [markdown]
# A dense layer is the same: each of its units sums a product for each of its weights. (Norms, ReLU
# and pooling take few operations, and are left out.) For a whole network we need each layer's
# output. A **forward hook** is a function that Gluon calls whenever a layer has computed:

# %%
def count_operations(net):
    counted = []

    def note(layer, inputs, output):  # the hook
        counted.append(operations_of(layer, output))

    layers = []
    net.apply(layers.append)  # all layers, also those within others
    for layer in layers:
        if isinstance(layer, (gluon.nn.Conv2D, gluon.nn.Dense)):
            layer.register_forward_hook(note)
    net(nd.zeros((1, 1, 28, 28)))  # one image
    return sum(counted)


def count_parameters(net):
    sizes = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":  # running statistics have no gradient
            sizes.append(int(np.prod(parameter.shape)))
    return sum(sizes)


forward = {}
parameters = {}
for name, net in [("LeNet", lenet()), ("ResNet-18", hybrid_resnet18(10))]:
    net.initialize()
    forward[name] = count_operations(net)
    parameters[name] = count_parameters(net)
    print(f"{name:9} {forward[name]:11,} operations forward, {parameters[name]:10,} parameters, "
          f"{forward[name] / parameters[name]:.0f} for each")
print(f"LeNet's first layer: {by_hand / forward['LeNet']:.0%} of its operations")
assert forward["LeNet"] == 4_500_720
assert (parameters["LeNet"], parameters["ResNet-18"]) == (129_068, 11_175_818)

# %% [markdown]
# Why do convolutions take far more than two operations for each parameter? Because each weight is
# used at every place of the image.
#
# ### Backward
#
# A layer's backward pass computes two things: the gradient of its weights, and that of its input.
# Each takes as many operations as forward. For a dense layer that can be seen from the shapes:

# %%
x = np.ones((1, 800))
weight = np.ones((800, 128))
y = x @ weight
grad_y = np.ones((1, 128))
grad_weight = x.T @ grad_y
grad_x = grad_y @ weight.T


def product_operations(left, right):
    rows, shared = left.shape
    _, columns = right.shape
    return 2 * rows * shared * columns


for_y = product_operations(x, weight)
for_grad_weight = product_operations(x.T, grad_y)
for_grad_x = product_operations(grad_y, weight.T)
print("forward:               ", for_y)
print("gradient of the weight:", for_grad_weight)
print("gradient of the input: ", for_grad_x)
assert for_grad_weight == for_y
assert for_grad_x == for_y

# %% [markdown]
# So **training takes three times the operations of a forward pass.** (The first layer needs no
# gradient of its input. That leaves out 5 % of LeNet's forward pass.)
#
# ## A transformer: 6N a token
#
# In a transformer each token goes once through all matrices but the embedding, which is only looked
# up (so leave it out of $N$, unless it is also the output layer). So each weight is one
# multiplication and one addition: $2N$ operations forward for $N$ parameters, and $6N$ with the
# backward pass. What does that leave out? In attention each token's query also meets the keys of
# all $T$ tokens of its sequence, and its weights meet all their values. For a width $d$ that is
# $2Td$ operations each. So a layer takes, for each token:

# %%
def layer_operations(width, tokens):
    attention_matrices = 2 * 4 * width**2  # query, key, value, output
    mlp = 2 * 8 * width**2  # two matrices, to 4 times the width and back
    meeting = 2 * 2 * tokens * width  # with all keys, with all values
    return attention_matrices + mlp, meeting


for tokens in [1024, 4096, 32_768, 131_072]:
    in_matrices, meeting = layer_operations(4096, tokens)
    print(f"sequences of {tokens:7,} tokens: meeting takes {meeting / in_matrices:.0%} of what the "
          "matrices take")

# %% [markdown]
# So **6N is right while sequences are short beside six times the width**: the two are in the ratio
# $T / 6d$. (We let a token meet all others. In a causal network it meets only those before it, so
# half of them on average. PaLM's appendix B counts all, as we do: arXiv:2204.02311.)
#
# Also left out is recomputation (chapter 17). It adds up to one forward pass, so that the *device*
# does $8N$, of which the *model* needs $6N$.
#
# ## Which share of the peak?
#
# A data sheet names a peak. How much of it does a training reach? **Model FLOPs utilization** (MFU)
# is the operations a second that the model needs ($6N$ for each token, and PaLM adds attention's),
# divided by the peak. What is recomputed doesn't count, so MFU can't be raised by doing more than
# is needed. The measure comes from the paper on PaLM, a transformer: 540 billion parameters, 6,144
# chips with a peak of 275 · 10¹² each, and 238,300 tokens a second (section 4.1). **Predict:** is
# its MFU about 10, 50 or 90 %?

# %% tags=["predict"]
needed = 6 * 540e9 * 238_300  # operations a second
peak = 6144 * 275e12
print(f"MFU by 6N: {needed / peak:.1%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# It is 45.7 %, so about half. The paper says 46.2 %, since it also counts attention's meeting of
# tokens, which we left out.
#
# </details>
#
# *Llama 3* with 405 billion parameters reached 38 to 43 % on 8,192 and 16,384 H100s, whose peak is
# 989 · 10¹² in bfloat16 (arXiv:2407.21783, table 4). Those are large matrices and people who had
# months for it. And a small network? *The Straight Dope*, the book before *Dive into Deep
# Learning*, trained LeNet on one GPU in 2017, with batches of 64 and an epoch in 4.7 s:

# %%
steps = 60_000 / 64
lenet_rate = steps * 64 * 3 * forward["LeNet"] / 4.7
print(f"LeNet, 2017: {lenet_rate / 1e9:.0f} · 10⁹ operations a second")
print(f"as a share of a V100's peak in float32, 14 · 10¹²: {lenet_rate / 14e12:.1%}")

# %% [markdown]
# (Loading data and Python are in it. The page doesn't name its GPU; we take one of that year.) So
# **a share measured on one network says little about another**: it depends on the network, the
# batch and the program. On paper it is an assumption, and the first thing to measure.
#
# ## What a training takes
#
# With a share assumed, one line gives days. *Llama 2* with 7 billion parameters has seen 2 · 10¹²
# tokens, on A100s with a peak of 312 · 10¹² in bfloat16. Its paper says 184,320 GPU hours
# (arXiv:2307.09288, table 2). **Predict:** which MFU does that mean?

# %% tags=["predict"]
operations = 6 * 6.7e9 * 2e12  # 6.7 billion, to be more exact
gpu_seconds = 184_320 * 3600
print(f"{operations:.1e} operations, MFU {operations / gpu_seconds / 312e12:.0%}")

for share in [0.2, 0.4, 0.6]:
    days = operations / (share * 989e12) / (24 * 3600)
    print(f"on one H100 at {share:.0%}: {days:,.0f} days; on 256 with efficiency 90 %: "
          f"{days / 256 / 0.9:.0f} days")

# %% [markdown]
# <details><summary>What came out</summary>
#
# It means an MFU of 39 % by $6N$, if all of these hours were spent in steps. Its sequences have
# 4,096 tokens and its width is 4,096, so attention adds a sixth, and by PaLM's measure it is 45 %.
#
# </details>
#
# ### Bytes, in 16 bits and in 32
#
# **bfloat16** has float32's range in half of the bits (deeper: bfloat16 and scaled losses). What
# does it save? Mixed precision keeps weights, gradients and activations in 16 bits, and besides a
# copy of the weights and Adam's two moments in float32 (arXiv:1910.02054, section 3.1). For each
# parameter:

# %%
in_float32 = {"weight": 4, "gradient": 4, "moments": 8}
in_bfloat16 = {"weight": 2, "gradient": 2, "copy": 4, "moments": 8}
for name, nbytes in [("float32", in_float32), ("bfloat16", in_bfloat16)]:
    total = sum(nbytes.values())
    print(f"{name:8} {total} B a parameter, {7 * total} GB for 7 billion, "
          f"{nbytes['gradient']} B of gradient to send")

# %% [markdown]
# So **bfloat16 halves what is sent, if gradients are sent in it, but not what weights and optimizer
# take.** Operations gain
# more: on an H100 the peak is 989 · 10¹² in bfloat16 against 67 · 10¹² in float32, without TF32
# (NVIDIA's data sheet). Then computing gets up to 15 times as fast, and communication twice as
# fast:

# %%
tokens = 8192  # of each device
size = 7e9  # parameters
for name, peak, width in [("float32", 67e12, 4), ("bfloat16", 989e12, 2)]:
    computing = 6 * size * tokens / (0.4 * peak)
    nbytes = size * width
    communication = 2 * nbytes / 450e9 + 2 * (nbytes / 8) / 50e9  # chapter 11's
    print(f"{name:8} computing {computing:5.2f} s, communication {communication:.2f} s, "
          f"efficiency {computing / (computing + communication):.0%}")

# %% [markdown]
# Both efficiencies are without overlap, and with 40 % of the peak in both.
#
# **What computes faster, scales worse, if its link doesn't keep up.** So a good efficiency may only
# say that the devices are slow.
#
# ## Paper against the clock: 2017
#
# Chapter 11 shows MXNet's published table. Can paper predict it? We take ResNet-152 and AlexNet on
# 16 K80s, a ring on PCIe 3.0 with 15.75 · 10⁹ bytes a second, and the published time on one GPU:

# %%
published = {  # bytes of gradients, largest array, seconds on one GPU, on 16
    "ResNet-152": (240e6, 4 * 512 * 512 * 9, 32 / 20.08, 16 * 32 / 298.03),
    "AlexNet": (203e6, 4 * (256 * 5 * 5) * 4096, 512 / 457.07, 16 * 512 / 4244.18),
}
for name, (nbytes, largest, on_one, on_16) in published.items():
    ring = 2 * 15 / 16 * nbytes / 15.75e9
    print(f"{name:10} efficiency by a ring {on_one / (on_one + ring):.0%}, "
          f"published {on_one / on_16:.0%}; largest array {largest / nbytes:.0%} of all bytes")

# %% [markdown]
# Paper was too optimistic for both, and far too much for AlexNet. Its store was no ring: each array
# goes whole to one GPU, its owner (chapter 07). So the owner of AlexNet's largest array receives 15
# copies of more than half of all bytes, and sends 15 sums. (The busiest owner has at least the
# largest array, and at least a $k$-th of all bytes.) We fit *one* number to *one* point, the
# bandwidth that ResNet-152 shows on two GPUs, and ask both formulas for AlexNet:

# %%
nbytes, largest, on_one, _ = published["ResNet-152"]
on_two = 2 * 32 / 38.76
bandwidth = nbytes / (on_two - on_one)  # on two GPUs a ring sends every byte once
print(f"fitted: {bandwidth / 1e9:.1f} · 10⁹ bytes a second, not 15.75")

nbytes, largest, on_one, _ = published["AlexNet"]
images_a_second = {2: 870.43, 4: 1514.8, 8: 2852.5, 16: 4244.18}
for k, rate in images_a_second.items():
    ring = 2 * (k - 1) / k * nbytes / bandwidth
    whole_arrays = 2 * (k - 1) * max(largest, nbytes / k) / bandwidth
    print(f"AlexNet on {k:2}: published {rate / k / 457.07:.0%}, "
          f"ring {on_one / (on_one + ring):.0%}, "
          f"whole arrays {on_one / (on_one + whole_arrays):.0%}")

# %% [markdown]
# Whole arrays come within 6 points, a ring misses by up to 34. Does that prove that the large array
# was the reason? It doesn't: reading data, for example, may have set a limit. Networks with large
# dense layers can scale badly with rings, too: on 512 GPUs Horovod reports 90 % for Inception V3
# and 68 % for VGG-16 (`docs/benchmarks.rst`). But **here the formula mattered more than the
# bandwidth**, which both formulas have from the same fitted point.
#
# ## Summary
#
# - A layer's forward pass takes 2 operations for each output and each weight that goes into it.
#   Training takes three times a forward pass; for a transformer that is $6N$ a token, while
#   sequences are short beside six times the width.
# - MFU is the operations that the model needs, as a share of the peak: 46 % for PaLM, about 1 % for
#   LeNet in 2017, if its GPU was a V100 (a few percent of an older one's). It is the assumption to
#   measure first.
# - bfloat16 halves the bytes that are sent, if gradients are sent in it, and keeps 16 bytes a
#   parameter with Adam. Since computing gains more, the efficiency falls.
# - For 2017's table a data sheet's bandwidth was far too optimistic. With one fitted point, whole
#   arrays came within 6 points of AlexNet.
#
# **Sources.** NVIDIA, *H100 Tensor Core GPU* and *Tesla V100* (data sheets). *The Straight Dope*,
# "Training on multiple GPUs with gluon" (commit 72a83ca, 2017). MXNet 1.9.1:
# `example/image-classification/README.md` and `symbols/alexnet.py` there. Horovod,
# `docs/benchmarks.rst`.
