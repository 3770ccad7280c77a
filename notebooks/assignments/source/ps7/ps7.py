# %% [markdown]
# # Assignment 7: data parallelism in PyTorch
#
# **You will** write three small pieces of DistributedDataParallel: gradients that are averaged one
# by one, buckets that are sent while the backward pass goes on, and a step that adds up gradients
# over several small batches and sends them once.
#
# **You need** chapter 14, before it chapter 13 if PyTorch is new to you, and PyTorch (`make setup
# TORCH=1`). **Time**: about two and a half hours. **Points**: 12, of which 2 are for words.
#
# **You may use** anything in PyTorch. Of `torch.distributed`: `get_rank`, `get_world_size`,
# `broadcast`, `all_reduce`, `all_gather`, `all_gather_single`, `reduce_scatter`,
# `reduce_scatter_single` and `barrier`, with or without `async_op=True`, with the operations SUM,
# AVG, PRODUCT, MIN and MAX, `broadcast_object_list` and `all_gather_object`. Call them as
# `dist.all_reduce(...)`. What you start with `async_op=True` has arrived after `wait()`, and not
# before. When it is marked there is nothing else: no `send`, no groups of some ranks.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values, other networks and with one to four ranks, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.
#
# **When something is wrong**: as long as a class isn't written, its tests end with `NameError` or
# `NotImplementedError`. If one rank waits for a message that another doesn't send, a test ends
# after 30 seconds with `TimeoutError`. The first test, and each after an error, starts new
# processes, which takes some of that time. If their messages have different lengths, gloo may end
# the process (`TerminatedWorkerError`), or the tensors hold something else.

# %% tags=["given"]
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

# %% [markdown]
# The network, in float64: layers $\tanh(x W_i + b_i)$, and a buffer, `shift`, that is added to the
# inputs. `route` says which layers an input passes, in which order: `[0, 1]` both layers, `[0, 0]`
# the first one twice, and with `[1]` the first gets no gradient. `note`, if there is one, is called
# whenever a backward pass comes to a layer.


# %% tags=["given"]
class Net(nn.Module):
    """layers: [[W0, b0], [W1, b1], ...], arrays. frozen: numbers of layers that aren't trained."""

    def __init__(self, layers, shift, frozen):
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.tensor(array), requires_grad=i not in frozen)
            for i, layer in enumerate(layers) for array in layer)
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x, route, note=None):
        x = x + self.shift
        for i in route:
            x = torch.tanh(x @ self.layers[2 * i] + self.layers[2 * i + 1])
            if note and x.requires_grad:
                x.register_hook(lambda gradient, i=i: note(f"layer {i}"))
        return x


def copy(tensor):
    return None if tensor is None else tensor.detach().clone().numpy()


# %% [markdown]
# `ranks` runs a function in several processes and returns what each returned; it is chapter 14's.
# To try your classes, give `on_each` a function and one list of arguments for each rank.

# %%
from ranks import ranks


def call_with(function, given):
    return function(*given[dist.get_rank()])


def on_each(function, given):
    return ranks(call_with, function, given, world=len(given), seconds=30)


print(on_each(lambda x: f"rank {dist.get_rank()} of {dist.get_world_size()} got {x}", [[1], [2]]))

# %% [markdown]
# ## 1. One gradient at a time (4 points)
#
# `NaiveDDP(module)` is a module around another one:
#
# - It keeps it, and no copy, as `.module`, passes all inputs to it, keyword arguments too, and
#   returns its output.
# - When it is made, the parameters and buffers of all ranks become rank 0's, frozen ones too.
#   (You will find all of them contiguous.)
# - `finish_gradient_synchronization()` is called after each backward pass. Then each gradient
#   becomes the sum of all ranks' gradients, divided by the number of ranks. Where a parameter has
#   no gradient (`grad` is `None`), that rank counts as zeros; but a parameter that has a gradient
#   on *no* rank keeps `None`, so that weight decay leaves it alone. Zeros are a gradient. Which
#   parameters have one may change from step to step and from rank to rank, and a gradient that
#   wasn't cleared is one, too. A frozen parameter's gradient is left as it is.
#
# About fifteen lines.


# %% tags=["ranks"] nbgrader={"grade_id": "naive", "solution": true}
class NaiveDDP(nn.Module):
    """Averages gradients over all ranks, one at a time, after the backward pass."""

    def __init__(self, module):
        super().__init__()
        ### BEGIN SOLUTION
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        ### END SOLUTION

    def forward(self, *inputs, **options):
        ### BEGIN SOLUTION
        return self.module(*inputs, **options)
        ### END SOLUTION

    def finish_gradient_synchronization(self):
        ### BEGIN SOLUTION
        for p in self.module.parameters():
            if not p.requires_grad:
                continue
            users = torch.tensor(float(p.grad is not None))
            dist.all_reduce(users)
            if users == 0:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        ### END SOLUTION


# %% [markdown]
# The tests call your class through this function: one rank's training. Each step has its own
# inputs, targets and route.


# %% tags=["driver"]
def train_naive(layers, shift, frozen, steps, rate, decay, keep=()):
    """(the gradients of each step once they are synchronized, parameters and buffer at the end).

    keep: numbers of steps before which gradients are not cleared.
    """
    net = Net(layers, shift, frozen)
    model = NaiveDDP(net)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, rate, weight_decay=decay)
    gradients = []
    for number, (x, y, route) in enumerate(steps):
        if number not in keep:
            optimizer.zero_grad()
        (model(torch.tensor(x), route=route) - torch.tensor(y)).pow(2).mean().backward()
        model.finish_gradient_synchronization()
        gradients.append([copy(p.grad) for p in parameters])
        optimizer.step()
    return gradients, [copy(p) for p in parameters], copy(net.shift)


# %% [markdown]
# One layer of zeros, one example on each rank. At 0 the slope of tanh is 1, so the gradients are
# easy to follow: for the target $y$, $-2y$ for the bias, and that times the input for the weight.

# %%
zeros = [[np.zeros((1, 1)), np.zeros(1)]]
x = np.ones((1, 1))

# %% nbgrader={"grade_id": "naive-values", "points": 2}
results = on_each(train_naive, [
    [zeros, np.zeros(1), [], [[x, -1 * x, [0]]], 0.5, 0.0],
    [zeros, np.zeros(1), [], [[3 * x, -2 * x, [0]]], 0.5, 0.0]])
for rank, (gradients, (w, b), _) in enumerate(results):
    assert np.allclose(gradients[0][1], 3), (
        f"rank {rank}: the bias's gradient is {gradients[0][1]}; 2 and 4 have the mean 3")
    assert np.allclose(gradients[0][0], 7), (
        f"rank {rank}: the weight's gradient is {gradients[0][0]}; 2 and 12 have the mean 7")
    assert np.allclose([w.item(), b.item()], [-3.5, -1.5]), f"rank {rank}: {w}, {b}"

# %% nbgrader={"grade_id": "naive-start", "points": 1}
results = on_each(train_naive, [
    [[[np.full((1, 1), r + 5.0), np.full(1, r + 6.0)]], np.full(1, r + 7.0), [0], [], 0.5, 0.0]
    for r in range(3)])
for rank, (_, (w, b), shift) in enumerate(results):
    found = [w.item(), b.item(), shift.item()]
    assert found == [5, 6, 7], f"rank {rank} begins with {found}, and rank 0 with [5, 6, 7]"

# %% nbgrader={"grade_id": "naive-missing", "points": 1}
three = zeros * 3
results = on_each(train_naive, [
    [three, np.zeros(1), [], [[x, -1 * x, [0]], [x, x, [2]]], 0.0, 0.1],
    [three, np.zeros(1), [], [[x, -2 * x, [1]], [x, x, [2]]], 0.0, 0.1]])
for rank, (gradients, _, _) in enumerate(results):
    found = [[None if g is None else g.item() for g in step[1::2]] for step in gradients]
    assert found[0] == [1, 2, None], (
        f"rank {rank}: the biases' gradients are {found[0]}: rank 0 had 2 for the first, rank 1 "
        "had 4 for the second, and nobody used the third")
    assert found[1] == [None, None, -2], (
        f"rank {rank}: in the second step the biases' gradients are {found[1]}, and only the third "
        "was used, with -2 on both ranks")

# %% [markdown]
# ## 2. Buckets (4 points)
#
# `BucketedDDP(module, bucket_bytes)` sends its gradients in buckets, while the backward pass goes
# on. Here all ranks begin with the same parameters, so there is nothing to broadcast; all
# parameters have the same type, and each that isn't frozen gets a gradient in each backward pass.
# These are the rules:
#
# 1. Go through the parameters that aren't frozen in the *reverse* order of `module.parameters()`.
#    If the gradients of the latest bucket and of this parameter have at most `bucket_bytes` bytes
#    together, it joins that bucket, else it begins a new one. So a parameter that is larger than
#    that has a bucket of its own.
# 2. Each bucket is one `all_reduce` of one flat tensor, which has as many numbers as the gradients
#    in it, and nothing else is sent.
# 3. Buckets are sent in their order: the bucket that was filled first, then the second, and so
#    on. Each is sent as soon as all its gradients are there and the ones before have been sent:
#    while the backward pass still has other layers to do. When the backward pass ends, all
#    buckets have been sent. Gradients don't always become ready in this order. Use
#    `async_op=True`, so that the backward pass goes on meanwhile.
# 4. `finish_gradient_synchronization()` waits for the messages. Then each `grad` is the mean
#    of all ranks' gradients.
#
# `.module` and calls are as in the first exercise. There may be any number of steps, each with one
# backward pass, and before each the gradients are `None`. Zeros are sent as other gradients
# are. Raise `ValueError` if `bucket_bytes` is not above 0.
#
# About twenty-five lines, with methods of your own. `register_post_accumulate_grad_hook` is what
# you need. (`p in bucket`, where `bucket` is a list, asks for a parameter with equal *values*. A
# set of parameters, or a dictionary by parameter, looks for `p` itself.)


# %% tags=["ranks"] nbgrader={"grade_id": "bucketed", "solution": true}
class BucketedDDP(nn.Module):
    """Averages gradients over all ranks, a bucket at a time, during the backward pass."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        ### BEGIN SOLUTION
        if not bucket_bytes > 0:
            raise ValueError(f"bucket_bytes={bucket_bytes}: should be above 0")
        self.module, self.buckets, size = module, [], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or size + p.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.mark_ready)
        self.ready, self.sent = set(), []
        ### END SOLUTION

    def forward(self, *inputs, **options):
        ### BEGIN SOLUTION
        return self.module(*inputs, **options)

    def mark_ready(self, p):
        self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            flat = torch.cat([p.grad.flatten() for p in self.buckets[len(self.sent)]])
            self.sent.append((flat, dist.all_reduce(flat, async_op=True)))
        ### END SOLUTION

    def finish_gradient_synchronization(self):
        ### BEGIN SOLUTION
        for bucket, (flat, work) in zip(self.buckets, self.sent):
            work.wait()
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, mean in zip(bucket, means):
                p.grad = mean.view_as(p)
        self.ready.clear()
        self.sent.clear()
        ### END SOLUTION


# %% [markdown]
# One rank's training again. `note` is called when a backward pass comes to a layer, and when it has
# ended, before `finish_gradient_synchronization()`.


# %% tags=["driver"]
def train_bucketed(layers, frozen, bucket_bytes, steps, rate, note):
    """(the gradients of each step once they are synchronized, parameters at the end)."""
    net = Net(layers, np.zeros(layers[0][0].shape[0]), frozen)
    model = BucketedDDP(net, bucket_bytes)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, rate, momentum=0.5)
    gradients = []
    for x, y, route in steps:
        optimizer.zero_grad()
        output = model(torch.tensor(x), route=route, note=note)
        (output - torch.tensor(y)).pow(2).mean().backward()
        note("end")
        model.finish_gradient_synchronization()
        gradients.append([copy(p.grad) for p in parameters])
        optimizer.step()
    return gradients, [copy(p) for p in parameters]


# %% [markdown]
# `logged` calls it, and notes how many numbers each all-reduce has, when it was sent, and whether
# something was broadcast.


# %%
def logged(*given):
    log = []
    all_reduce = dist.all_reduce
    broadcast = dist.broadcast

    def note_size(tensor, *args, **options):
        log.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    def note_broadcast(*args, **options):
        log.append("a broadcast")
        return broadcast(*args, **options)

    dist.all_reduce = note_size
    dist.broadcast = note_broadcast
    try:
        return *train_bucketed(*given, log.append), log
    finally:
        dist.all_reduce = all_reduce
        dist.broadcast = broadcast


def with_buckets(bucket_bytes, routes=([0, 1], [0, 1]), frozen=()):
    """Two layers of 2 x 2: in reverse order, 2 numbers, 4, 2 and 4, of 8 bytes each. A route for
    each rank, two steps."""
    rng = np.random.default_rng(7)
    layers = [[rng.normal(size=(2, 2)), rng.normal(size=2)] for _ in range(2)]
    return on_each(logged, [[layers, list(frozen), bucket_bytes, [
        [rng.normal(size=(3, 2)), np.zeros((3, 2)), route] for _ in range(2)], 0.1]
        for route in routes])


# %% nbgrader={"grade_id": "bucketed-values", "points": 1}
layer = [[[np.zeros((1, 1)), np.zeros(1)]], []]   # gradients: as in the first exercise
for bucket_bytes in (8, 16):
    for rank, (gradients, _) in enumerate(on_each(train_bucketed, [
            [*layer, bucket_bytes, [[x, -1 * x, [0]]], 0.1, lambda word: None],
            [*layer, bucket_bytes, [[3 * x, -2 * x, [0]]], 0.1, lambda word: None]])):
        found = [g.item() for g in gradients[0]]
        assert found == [7, 3], (
            f"buckets of {bucket_bytes} bytes, rank {rank}: the gradients are {found}, not [7, 3]: "
            "for the weight the mean of 2 and 12, for the bias that of 2 and 4. (Both parameters are "
            "0, so `p in bucket`, where `bucket` is a list, takes one for the other.)")

# %% nbgrader={"grade_id": "bucketed-messages", "points": 2}
for size, first, second in ((48, [6], [6]), (47, [2, 4], [2, 4]), (64, [], [8, 4]),
                            (1, [2, 4], [2, 4]), (1000, [], [12])):
    for rank, (_, _, log) in enumerate(with_buckets(size)):
        due = ["layer 1", *first, "layer 0", *second, "end"] * 2
        assert log == due, f"buckets of {size} bytes, two steps, rank {rank}: {log}, not {due}"

# %% nbgrader={"grade_id": "bucketed-care", "points": 1}
# On rank 1 layer 0 is the last one, so its gradients come first; on rank 0 layer 1's do.
(one, _, log), (two, _, log1) = with_buckets(48, ([0, 1], [1, 0]))
assert log == ["layer 1", 6, "layer 0", 6, "end"] * 2, f"rank 0, layers in order: {log}"
assert log1 == ["layer 0", "layer 1", 6, 6, "end"] * 2, f"rank 1, in another order: {log1}"
for a, b in zip(one[0], two[0]):
    assert np.allclose(a, b), "layers in another order on rank 1: the ranks' gradients differ"
for _, _, log in with_buckets(48, frozen=[0]):
    due = ["layer 1", 6, "end"] * 2
    assert log == due, f"the first layer is frozen: {log}, not {due}"
for bucket_bytes in (0, -1):
    try:
        with_buckets(bucket_bytes)
    except ValueError as error:
        print("As it should be, ValueError:", error)
    else:
        raise AssertionError(f"bucket_bytes={bucket_bytes}: no ValueError")

# %% [markdown]
# ## 3. Accumulation (2 points)
#
# Each rank has some small batches, `pieces`, a list of `(x, y)`. `train_step` makes *one* step
# of the optimizer from all of them, on all ranks, with the gradient of the mean loss over *all*
# examples of *all* ranks: the sum of `squared(net, x, y)` over all pieces, divided by the number of
# rows of all `x`. Return that mean loss, as it was before the step, a float, on all ranks.
#
# Pieces may differ in length, ranks in their number of pieces, and a rank may have none; one at
# least has one. `net` is a plain module, the same on all ranks, `optimizer` has its parameters.
# Their gradients may hold what an earlier step left there. Each piece gives each parameter that
# isn't frozen a gradient; a rank without pieces has none.
#
# However many pieces there are, a step sends each gradient once, and one message more at most,
# for the loss and the number of rows. In all these are at most two numbers more than the
# gradients have. You may also put several gradients, and those two numbers, into one message.
#
# About thirteen lines.


# %% tags=["given"]
def squared(net, x, y):
    return (net(x, range(len(net.layers) // 2)) - y).pow(2).sum()


# %% tags=["ranks"] nbgrader={"grade_id": "accumulated", "solution": true}
def train_step(net, optimizer, pieces):
    """Makes a step; returns the mean loss over all ranks' examples, as it was before."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64)  # loss, examples
    for x, y in pieces:
        loss = squared(net, x, y)
        loss.backward()
        totals += torch.tensor([loss.item(), len(x)], dtype=torch.float64)
    dist.all_reduce(totals)
    for p in net.parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(gradient)
            p.grad = gradient / totals[1]
    optimizer.step()
    return (totals[0] / totals[1]).item()
    ### END SOLUTION


# %% tags=["driver"]
def accumulate(layers, frozen, steps, rate):
    """(the loss of each step, the parameters at the end) on one rank, whose pieces are `steps`."""
    net = Net(layers, np.zeros(layers[0][0].shape[0]), frozen)
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.5)
    losses = []
    for pieces in steps:
        losses.append(train_step(net, optimizer,
                                 [(torch.tensor(x), torch.tensor(y)) for x, y in pieces]))
        for p in net.parameters():
            if p.requires_grad:
                p.grad = torch.ones_like(p)  # left there, for the next step to find
    return losses, [copy(p) for p in net.parameters()]


# %% [markdown]
# One layer of zeros; three examples with targets 1, 2 and 6, and inputs of 0. The losses are 1, 4
# and 36; the bias's gradients are $-2y$: $-2$, $-4$ and $-12$, in the mean $-6$.

# %%
none = np.zeros((1, 1))

# %% nbgrader={"grade_id": "accumulated-values", "points": 1}
for pieces in ([[[none, none + 1], [none, none + 2]], [[none, none + 6]]],
               [[], [[np.zeros((3, 1)), np.array([[1.0], [2], [6]])]]]):
    for rank, (losses, (_, b)) in enumerate(on_each(accumulate, [
            [zeros, [], [mine], 0.01] for mine in pieces])):
        assert np.isclose(b.item(), 0.06), f"rank {rank}: the bias is {b.item():.4g}, not 0.06"
        assert np.isclose(losses[0], 41 / 3), f"rank {rank}: the loss is {losses[0]:.4g}, not 41 / 3"

# %% nbgrader={"grade_id": "accumulated-messages", "points": 1}
def count_messages(*given):
    sizes, kept = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **b: (sizes.append(tensor.numel()), kept(tensor, *a, **b))[1]
    try:
        accumulate(*given)
    finally:
        dist.all_reduce = kept
    return sizes


five = [[none, none + 1]] * 5
for frozen, parameters in (([], 4), ([1], 2)):   # two layers
    for sizes in on_each(count_messages, [[zeros * 2, frozen, [five], 0.01]] * 2):
        assert len(sizes) <= parameters + 1 and sum(sizes) <= parameters + 2, (
            f"five pieces, {parameters} parameters of one number, layers {frozen} frozen: "
            f"all-reduces of {sizes} numbers")

# %% [markdown]
# ## 4. In your words (2 points)
#
# A model has trained on eight GPUs for a day when somebody finds that the replicas' weights
# differ. The loss looked well all the time. Name two mistakes, in code like that of any of the
# three exercises, that make replicas differ, and say why the loss didn't tell. What would you put
# into the training loop so that it is seen within minutes next time, and what does that cost, in
# messages and work? About ten sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# One point for two mistakes and the reason: replicas that begin apart (no broadcast, another seed
# on each rank); gradients used before `wait()`; a gradient that is never sent, such as one that
# is `None` on some ranks, or a backward pass without synchronization; clipping, or anything with
# random numbers, done by each rank for itself between the all-reduce and the update; buffers
# that only one rank updates. The loss of each rank is that of its own weights, and each replica
# trains, if more slowly or as several models; a mean over ranks hides the difference.
#
# One point for a check and its cost: every so many steps a number of the weights (a sum, or better
# a hash, or the largest difference from rank 0's) is compared over ranks, an error if it differs.
# A sum of all weights is one pass over memory and a message of one number: next to nothing every
# 100 steps. Comparing all weights costs a message of the model's size, about that of one all-reduce
# of the gradients.
