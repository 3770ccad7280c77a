# %% [markdown]
# # 02 · Splitting a batch
#
# With data parallelism each device gets its own part of every batch, a **shard**. How must a batch
# be cut, so that the step is still the one that a single device would make?
#
# > **What you'll do:** train on two devices with real images, write the function that cuts, and
# > make three mistakes that raise no error.
# >
# > **What you'll learn:** how to cut a batch of any size; what happens if labels and images get out
# > of step, or a device gets no data; why means need weights.
# >
# > **What you need:** chapter 01. No GPU. Reading takes {reading time}, running about ten seconds.

# %%
import helpers
from helpers import devices, your_turn

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

# %% [markdown]
# ## A step on two devices
#
# In chapter 01 two devices trained one weight on four numbers. Now they get a batch of 64 images,
# cut in the middle. (`load_data` finds MNIST, or says that there is none and takes scikit-learn's
# digits. `devices(2)` returns two GPUs if there are two, and else two simulated devices.)

# %% tags=["measured"]
data = helpers.load_data("mnist", limit=4000)
print(data)
x = nd.array(data.train_images[:64])
y = nd.array(data.train_labels[:64])

two = devices(2)
x_shards = [x[0:32].as_in_context(two[0]), x[32:64].as_in_context(two[1])]
y_shards = [y[0:32].as_in_context(two[0]), y[32:64].as_in_context(two[1])]
for x_shard, y_shard in zip(x_shards, y_shards):
    print(x_shard.context, "images", x_shard.shape, "labels", y_shard.shape)

# %% [markdown]
# The model is one matrix, which turns 784 pixels into 10 scores. The loss is the cross-entropy:
# `log_softmax` turns scores into log-probabilities, and `pick` takes the one of the image's label.
# We sum over the shard and divide later, by the number of images of the *whole* batch, because
# means over shards would need care, as the end of this chapter shows.

# %%
def loss_of(x, y, weight):
    scores = nd.dot(x.reshape((len(x), 784)), weight)  # [n, 10]
    log_probability = nd.pick(nd.log_softmax(scores), y)  # [n]
    return -log_probability.sum()

# %% [markdown]
# Each device finds the gradient of its own shard. The two are added and divided by the number of
# images, and both devices make the same update:

# %%
def step_on_two(x_shards, y_shards, weights, lr=0.1):
    losses = []
    for x_shard, y_shard, weight in zip(x_shards, y_shards, weights):
        with autograd.record():
            loss = loss_of(x_shard, y_shard, weight)
        loss.backward()
        losses.append(loss)

    first = weights[0].grad
    second = weights[1].grad.as_in_context(first.context)
    n = len(x_shards[0]) + len(x_shards[1])
    gradient = (first + second) / n  # the mean over all n images

    for weight in weights:
        weight[:] = weight - lr * gradient.as_in_context(weight.context)
    return (losses[0].asscalar() + losses[1].asscalar()) / n

# %% [markdown]
# Each device has a copy of the matrix. Its entries are zero at the start, so all ten scores are
# equal. **Predict:** what is the loss of the first step?

# %% tags=["predict"]
weights = [nd.zeros((784, 10), ctx=two[0]), nd.zeros((784, 10), ctx=two[1])]
for weight in weights:
    weight.attach_grad()

loss = step_on_two(x_shards, y_shards, weights)
print(f"loss of the first step: {loss:.4f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Equal scores give each of the ten classes the probability $\frac{1}{10}$. So the loss is
# $-\ln \frac{1}{10} = \ln 10 \approx 2.3026$, whatever the images are.
#
# </details>
#
# Is it the step that one device makes with the whole batch? We print three entries of the matrix,
# of a pixel in the middle of the image, and the assertion compares all 7,840:

# %% tags=["measured"]
whole = nd.zeros((784, 10), ctx=two[0])
whole.attach_grad()
with autograd.record():
    loss = loss_of(x.as_in_context(two[0]), y.as_in_context(two[0]), whole)
loss.backward()
whole[:] = whole - 0.1 / 64 * whole.grad

middle = 14 * 28 + 14  # row 14, column 14
print("one device alone:", whole[middle, :3].asnumpy())
for weight in weights:
    print("both, on", weight.context, weight[middle, :3].asnumpy())
    assert np.allclose(weight.asnumpy(), whole.asnumpy(), atol=1e-6)

# %% [markdown]
# It is the same step, up to rounding.
#
# ## Where to cut
#
# Two halves are easy. But ten images don't divide by three devices. So each gets three, and the
# first one also gets the image that is left over:
#
# ![Ten images with their labels, 0 to 9, are cut after the fourth and the seventh row. cpu(0)
# gets rows 0 to 3, cpu(1) rows 4 to 6, cpu(2) rows 7 to 9, each image with its
# label.](src/drawings/batch_to_shards.svg)
#
# In general $k$ devices get `n // k` of $n$ rows each, and the first `n % k` devices one more, so
# that no row is lost.
#
# ### Your turn: cut a batch
#
# Write `cut`, before you scroll on. It needn't move anything to a device.

# %% tags=["your-turn"]
def cut(batch, k):
    """Return a list of k blocks of rows of batch, in order, cut as in the picture."""
    ...


# A case: batch and k, and the blocks that are due.
ten = nd.arange(10)
ten_on_three = ((ten, 3), [ten[0:4], ten[4:7], ten[7:10]])
eleven = nd.arange(11)
eleven_on_four = ((eleven, 4), [eleven[0:3], eleven[3:6], eleven[6:9], eleven[9:11]])
six = nd.arange(12).reshape((6, 2))  # six rows of two
six_on_three = ((six, 3), [six[0:2], six[2:4], six[4:6]])
cut_cases = [ten_on_three, eleven_on_four, six_on_three]
your_turn(cut, cut_cases)

# %% [markdown]
# Our function also moves each block to its device. (A *rank* is a device's place in the list.)
# Uneven shards must be asked for with `even=False`, because it is easy to average them wrongly.

# %%
def split_and_load(data, devices, even=True):
    n = len(data)
    k = len(devices)
    if even and n % k != 0:
        raise ValueError(f"{n} examples don't divide by {k} devices: pass even=False")
    size = n // k
    longer = n % k
    shards = []
    begin = 0
    for rank, device in enumerate(devices):
        end = begin + size
        if rank < longer:
            end += 1
        shards.append(data[begin:end].as_in_context(device))
        begin = end
    return shards


three = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
batch = nd.arange(10)
for shard in split_and_load(batch, three, even=False):
    print(shard.context, shard.asnumpy())

# %% [markdown]
# Gluon, MXNet's library of layers (chapter 05), has such a function, with the option `even_split`.
# `helpers.split_and_load`, which later chapters use, also checks its arguments. Both make the same
# shards as ours, on the same devices:

# %%
ours = split_and_load(batch, three, even=False)
gluons = gluon.utils.split_and_load(batch, three, even_split=False)
helpers_own = helpers.split_and_load(batch, three, even=False)
for rank in range(3):
    for shard in [gluons[rank], helpers_own[rank]]:
        assert shard.context == ours[rank].context
        assert np.array_equal(shard.asnumpy(), ours[rank].asnumpy())

# %% [markdown]
# ## Labels stay with their images
#
# Images and labels are cut by two calls to `split_and_load`. They stay together, because the rows
# of a shard depend only on the length of the batch and on the number of devices.
#
# Another good way to cut is to *deal* rows like cards (**round-robin**), one to each device in
# turn, as PyTorch's `DistributedSampler` does (chapter 14):

# %%
def deal(data, devices):
    k = len(devices)
    shards = []
    for rank, device in enumerate(devices):
        rows = data[rank::k]  # rows rank, rank + k, rank + 2k, ...
        shards.append(rows.as_in_context(device))
    return shards

# %% [markdown]
# That is right if images *and* labels are dealt. But suppose that a program cuts images into blocks
# and deals only the labels:
#
# ![Images 0 to 3 are on cpu(0), 4 to 6 on cpu(1), 7 to 9 on cpu(2), each with a line to the label
# beside it. The labels are 0, 3, 6, 9 on cpu(0), 1, 4, 7 on cpu(1), and 2, 5, 8 on cpu(2). Only
# image 0 has its own label; the nine other lines are crossed out.](src/drawings/labels_dealt.svg)
#
# The shapes are right, so only the values reveal it. Here each image is its number in the
# batch, and so is its label. (With real images, fill all pixels of image $i$ with $i$.)

# %%
images = nd.arange(10)
labels = nd.arange(10)
image_shards = split_and_load(images, three, even=False)
label_shards = deal(labels, three)
for image_shard, label_shard in zip(image_shards, label_shards):
    print(image_shard.context, "images", image_shard.asnumpy(), "labels", label_shard.asnumpy())

# %% [markdown]
# Only image 0 has its own label, and there is no error. Does training notice? We train with real
# images on two devices, for 120 steps. `train` is given the functions that cut.

# %%
def train(cut_images, cut_labels):
    weights = [nd.zeros((784, 10), ctx=two[0]), nd.zeros((784, 10), ctx=two[1])]
    for weight in weights:
        weight.attach_grad()

    rng = np.random.default_rng(0)
    losses = []
    for step in range(120):
        # 64 random images
        rows = rng.integers(0, len(data.train_images), size=64)
        x = nd.array(data.train_images[rows])
        y = nd.array(data.train_labels[rows])
        x_shards = cut_images(x, two)
        y_shards = cut_labels(y, two)
        losses.append(step_on_two(x_shards, y_shards, weights))
    return losses


# %% tags=["measured", "trains"]
losses = train(cut_images=split_and_load, cut_labels=split_and_load)
print(f"first loss {losses[0]:.2f}, mean of the last 20: {np.mean(losses[-20:]):.2f}")
assert np.mean(losses[-20:]) < 1

# %% [markdown]
# The model learns. **Predict:** with dealt labels, will the loss fall more slowly, stay where it
# began, or rise?

# %% tags=["measured", "trains", "predict"]
losses = train(cut_images=split_and_load, cut_labels=deal)
print(f"first loss {losses[0]:.2f}, mean of the last 20: {np.mean(losses[-20:]):.2f}")
# %% tags=["fold", "trains"]
# check: what came out
assert 2.2 < np.mean(losses[-20:]) < 2.6

# %% [markdown]
# <details><summary>What came out</summary>
#
# It stays near $\ln 10 \approx 2.30$, where it began, or somewhat above. On two devices 62 of the
# 64 images have the label of another image, which has nothing to do with them.
#
# </details>
#
# So there is no error, not even after 120 steps. A loss that stays near $\ln(\text{classes})$ can
# have other causes, such as a learning rate that is too small. But **look at the labels first, and
# test a cut with a different value for each example.**
#
# ## A device without data
#
# The last batch of an epoch may have fewer examples than there are devices. A program can leave it
# out, or cut it for fewer devices, so that the others get nothing. What happens on a device that
# gets nothing? We take the sum of $wx$ over a shard as its loss, because the gradient is then
# simply the sum of the shard's inputs $x$. The first batch has the examples 1 to 6, two for each of
# three devices:

# %%
replicas = [nd.ones(1, ctx=device) for device in three]
for weight in replicas:
    weight.attach_grad()


def gradients_of(shards, replicas):
    for shard, weight in zip(shards, replicas):  # as many as there are shards
        with autograd.record():
            loss = (weight * shard).sum()
        loss.backward()
    return [weight.grad.asscalar() for weight in replicas]


print(gradients_of(split_and_load(nd.arange(1, 7), three), replicas))

# %% [markdown]
# They are 1 + 2, 3 + 4 and 5 + 6. The next batch has only the examples 1 and 2. We cut it for the
# first two devices only. **Predict:** what are the three gradients now?

# %% tags=["predict"]
shards = split_and_load(nd.arange(1, 3), three[:2])
print(gradients_of(shards, replicas))

# %% [markdown]
# <details><summary>What came out</summary>
#
# 1, 2 and 11. `backward` overwrote the first two gradients, but it didn't run on the third device.
# So that one still has 5 + 6, the gradient of the step *before*.
#
# </details>
#
# One device would have found 1 + 2 = 3. The sum over all three is 14, because it has the old
# gradient in it, and there is no error:
#
# ![Step 1: cpu(0) has the examples 1 and 2, cpu(1) 3 and 4, cpu(2) 5 and 6; their gradients 3, 7
# and 11 add up to 21. Step 2: cpu(0) has the example 1 and the gradient 1, cpu(1) has 2 and 2.
# cpu(2) has no data and still the gradient of step 1, 11. The sum is 14; it should be
# 3.](src/drawings/device_without_data.svg)
#
# A device on which `backward` runs in each step needs no zeros, because its gradient is overwritten
# (chapter 01). But the gradient of an idle device must be set to zero, or left out of the sum:

# %%
for weight in replicas:
    weight.grad[:] = 0
grads = gradients_of(shards, replicas)
print(grads, "sum:", sum(grads))

# %% [markdown]
# **Each device needs at least one example, or its old gradient must be kept out of the sum.**
#
# ## Is a mean of means the mean?
#
# So far each device summed over its shard, and the sum of all was divided once, by $n$. In PyTorch
# it is usual to average: each device takes the *mean* over its shard, and `DistributedDataParallel`
# (DDP, chapter 14) the mean of these means. Suppose the gradients of the examples are 0, 1, 2 and
# so on; we take nine examples, then ten. **Predict:** for which of the two batches is the mean of
# means the mean of the batch?

# %% tags=["predict"]
for n in [9, 10]:
    batch = nd.arange(n)
    means = []
    for shard in split_and_load(batch, three, even=False):
        means.append(shard.mean().asscalar())
    print(f"{n} examples, means of the shards: {means}")
    print(f"    mean of the means: {sum(means) / 3:.2f}")
    print(f"    mean of the batch: {batch.mean().asscalar():.2f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only for nine, where all shards have three examples. Of ten, the first shard has four, and
# together they count only as much as another shard's three. So the mean of means is 4.83, not 4.50.
#
# </details>
#
# With equal shards the mistake doesn't show, so **code that will meet unequal shards must be tested
# on them.** There are two ways to be right. Either add sums and divide once. Or multiply each mean
# by the weight $\frac{n_i}{n}$, where the device has $n_i$ of $n$ examples, and add. For the ten:

# %%
ten = nd.arange(10)
total = 0
weighted = 0
for shard in split_and_load(ten, three, even=False):
    total += shard.sum().asscalar()
    weighted += len(shard) / len(ten) * shard.mean().asscalar()
print(f"sums, divided once: {total / len(ten):.2f}")
print(f"weighted means:     {weighted:.2f}")
print(f"mean of the batch:  {ten.mean().asscalar():.2f}")

# %% [markdown]
# **Means need weights, sums don't.** (DDP itself divides the sum by the number $k$ of devices. So
# there the weight of a mean is $k\,\frac{n_i}{n}$.)
#
# ## Summary
#
# Several devices make the step of one device if each example is in one shard, beside its own label,
# if every gradient in the sum comes from this batch, and if the sum is divided once, by the number
# of examples. (That holds for networks that treat each example by itself; BatchNorm doesn't:
# chapter 09.) Three mistakes raise no error:
#
# - Labels and images are cut differently: here the loss stayed near $\ln(\text{classes})$.
# - A device without data keeps the gradient of the step before.
# - With unequal shards a mean of means is not the mean.
#
# **Further reading.** `split_data` and `split_and_load` in MXNet 1.9.1's `gluon/utils.py`.

# %% [markdown]
# ## Exercises
#
# 1. **Dealing cards.** Deal images *and* labels. Does the model learn? When is dealing better than
#    blocks?
# 2. **Undo it.** Three devices have computed predictions for images that were dealt. Write
#    `gather(shards, device)`, which puts the rows in the order of the batch again, on one device.
# 3. **A step with means.** Let each device take the mean loss of its shard, and cut the 64 images
#    into 48 and 16. Show that the gradient is that of one device with weights, and isn't without.

# %% [markdown]
# ### Answer to *Your turn*
#
# Shard $i$ begins after $i$ shards of `n // k` rows and the extra rows of those before it, of which
# there are $i$, but no more than `n % k`. NumPy's `array_split` has the same rule in its
# documentation.

# %% tags=["solution", "your-turn"]
def cut(batch, k):
    size = len(batch) // k
    longer = len(batch) % k
    blocks = []
    for rank in range(k):
        begin = rank * size + min(rank, longer)
        end = (rank + 1) * size + min(rank + 1, longer)
        blocks.append(batch[begin:end])
    return blocks


your_turn(cut, cut_cases)

# %% [markdown]
# ### Answer 1
#
# It learns, since image and label meet on the same device, at the same place. If the data is
# sorted, by class or by length, blocks give the devices different kinds of examples, and dealing
# gives each nearly the same mix. That matters for BatchNorm, whose statistics are those of one
# device (chapter 09), and for balanced work.

# %% tags=["solution", "measured", "trains"]
losses = train(cut_images=deal, cut_labels=deal)
print(f"mean loss of the last 20 steps: {np.mean(losses[-20:]):.2f}")
assert np.mean(losses[-20:]) < 1, "the model should learn"

# %% [markdown]
# ### Answer 2
#
# Row 0 of shard 0 is row 0 of the batch, its row 1 is row $k$, and so on: the slice of `deal`, on
# the other side of the equals sign.

# %% tags=["solution"]
def gather(shards, device):
    k = len(shards)
    n = sum(len(shard) for shard in shards)
    batch = nd.zeros((n, *shards[0].shape[1:]), ctx=device)
    for rank, shard in enumerate(shards):
        batch[rank::k] = shard.as_in_context(device)
    return batch


rows = nd.arange(20).reshape((10, 2))
again = gather(deal(rows, three), three[2])
print(again.context, again[:, 0].asnumpy())
assert np.array_equal(again.asnumpy(), rows.asnumpy())

# %% [markdown]
# ### Answer 3
#
# The loss of a shard is divided by the shard's size, and the two gradients are added with the
# weights `shares`: $\frac{48}{64}$ and $\frac{16}{64}$, or $\frac12$ and $\frac12$ for the mean of
# means.

# %% tags=["solution", "measured"]
def gradient_of_means(x_shards, y_shards, shares):
    weights = [nd.zeros((784, 10), ctx=two[0]), nd.zeros((784, 10), ctx=two[1])]
    gradient = 0
    for x_shard, y_shard, weight, share in zip(x_shards, y_shards, weights, shares):
        weight.attach_grad()
        with autograd.record():
            loss = loss_of(x_shard, y_shard, weight) / len(x_shard)
        loss.backward()
        gradient = gradient + share * weight.grad.asnumpy()
    return gradient


x_shards = [x[0:48].as_in_context(two[0]), x[48:64].as_in_context(two[1])]
y_shards = [y[0:48].as_in_context(two[0]), y[48:64].as_in_context(two[1])]
expected = whole.grad.asnumpy() / 64
for name, shares in [("weighted", [48 / 64, 16 / 64]), ("mean of means", [1 / 2, 1 / 2])]:
    found = gradient_of_means(x_shards, y_shards, shares)
    apart = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"{name}: off by {apart:.0e} of the largest entry")
    if name == "weighted":
        assert apart < 1e-5
    else:
        assert apart > 0.1
