# %% [markdown]
# # 20 · One mesh
#
# Chapter 14 cut the batch, chapter 18 the matrices, chapter 19 the layers. Large models are trained
# with all of these at the same time. We begin with two of them, so that each rank has a part of the
# examples *and* a part of the matrices. (The layers come in the second half.) Then a sum can
# run over two kinds of groups: the ranks that hold the same part of the model, or those that have
# the same examples. *What is summed over which group?*
#
# ![Four ranks in two rows and two columns. Each row is a tensor group, whose ranks have the same
# examples; each column is a data group, whose ranks have the same half of each
# matrix.](src/drawings/mesh_groups.svg)
#
# > **What you'll do:** write the table that answers this, break its entries one by one, and see
# > what happens.
# >
# > **What you'll learn:** what a wrong group does, and how you notice it; how to find the gradient
# > norm over a mesh; how to run the program that does all of it with PyTorch's own parts, on one
# > machine or several.
# >
# > **What you need:** chapters 14 and 18, for the second half also chapter 16 (`fully_shard`),
# > chapter 17 (the network) and chapter 19 (stages, micro-batches), no GPU, and PyTorch 2.13 or
# > newer: `make setup TORCH=1` installs it. Reading takes {reading time}, running about a minute on
# > two cores.

# %% tags=["torch"]
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helpers import your_turn
from helpers.compare import largest_difference
from ranks import ranks
from tensor_parallel import ColumnLinear, RowLinear

# %% [markdown]
# ## Four ranks, four groups
#
# Such an arrangement of ranks is a **device mesh**. That of chapter 18 had one dimension. Ours has
# two, each with a name, and a rank can ask the mesh for its group in each of them.

# %%
def make_mesh(data=2, tensor=2):
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    dist.barrier()  # wait for all: no rank may end while another still connects its groups
    return mesh


def my_groups():
    mesh = make_mesh()
    data_group = dist.get_process_group_ranks(mesh.get_group("data"))
    tensor_group = dist.get_process_group_ranks(mesh.get_group("tensor"))
    return f"data group {data_group}, tensor group {tensor_group}"


for rank, groups in enumerate(ranks(my_groups, world=4)):
    print(f"rank {rank}: {groups}")

# %% [markdown]
# Rank 2's data group is the left column, ranks 0 and 2, and its tensor group the lower row, ranks 2
# and 3. A group's name says in what its ranks differ: the ranks of a data group have different
# data, those of a tensor group different parts of the matrices.
#
# ## A block, and what must come out
#
# Our network is half a block of a transformer: a LayerNorm, and two matrices with GELU between
# them. It is in float64, so that only the last digits may differ.

# %%
class HalfBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4).double()
        self.up = nn.Linear(4, 8).double()
        self.down = nn.Linear(8, 4).double()

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


def make_net():
    torch.manual_seed(0)
    return HalfBlock()


torch.manual_seed(20)
x = torch.randn(12, 4).double()
y = torch.randn(12, 4).double()
for name, p in make_net().named_parameters():
    print(f"{name:12} {list(p.shape)}")

# %% [markdown]
# One process trains it for five steps on the batch of 12 examples, and we want the same weights
# from four ranks. Before each step the gradient is **clipped**, so that no batch makes too large a
# step. The **gradient norm** is the root of the sum of all squares, of every number in every
# gradient. Where it is more than `LARGEST`, all gradients are scaled down by the same factor. In
# PyTorch `nn.utils.clip_grad_norm_` does both; here we write it.

# %%
LARGEST = 0.55
RATE = 0.5


def clip_and_step(net, norm):
    for p in net.parameters():
        p.grad *= min(1, LARGEST / norm)
        p.data -= RATE * p.grad


one_process = make_net()
for step in range(5):
    one_process.zero_grad()
    loss = F.mse_loss(one_process(x), y)
    loss.backward()
    square = 0
    for p in one_process.parameters():
        square += p.grad.square().sum()
    norm = square.sqrt()
    clip_and_step(one_process, norm)
    print(f"step {step + 1}: loss {loss:.3f}, norm {norm:.3f}")

# %% [markdown]
# ## Who holds what
#
# On the mesh each data rank gets half of the examples, and each tensor rank half of the matrices.
# `up` is **sharded** by its outputs, with its bias, and `down` by its inputs, as in chapter 18. The
# LayerNorm and the bias of `down` are **replicated**: each rank has all of them.
#
# The layers are those of chapter 18, from [tensor_parallel.py](tensor_parallel.py). They take a
# second argument, the group in which they send. We give them the tensor group, so they know nothing
# of the data group. For its examples a rank asks the mesh how many data ranks there are, and which
# of them it is, 0 or 1:

# %%
KIND = {
    "norm.weight": "replicated",
    "norm.bias": "replicated",
    "up.weight": "sharded",
    "up.bias": "sharded",
    "down.weight": "sharded",
    "down.bias": "replicated",
}


def divide(net, mesh):
    """Put this rank's parts of both matrices into the network."""
    tensor_group = mesh.get_group("tensor")
    net.up = ColumnLinear(net.up, tensor_group)
    net.down = RowLinear(net.down, tensor_group)


def my_examples(batch, mesh):
    data_ranks = mesh["data"].size()
    place = mesh.get_local_rank("data")
    return batch.chunk(data_ranks)[place]


def what_i_hold():
    mesh = make_mesh()
    net = make_net()
    net.up.bias.data = torch.arange(8.0)  # to see which of them come here
    divide(net, mesh)
    return my_examples(torch.arange(12), mesh), net.up.bias.data


for rank, (examples, bias) in enumerate(ranks(what_i_hold, world=4)):
    print(f"rank {rank}: examples {examples.tolist()}, numbers {bias.tolist()} of up.bias")

# %% [markdown]
# ## Before anything is summed
#
# Each rank computes the mean loss of its examples and calls `backward()`. Take two numbers of its
# gradient: the first of the LayerNorm's bias, which is replicated, and the first that it has of
# `up.bias`, which is sharded. **Predict:** how many different values are there among the four
# ranks, of each?

# %% tags=["predict"]
def two_gradients():
    mesh = make_mesh()
    net = make_net()
    divide(net, mesh)
    loss = F.mse_loss(net(my_examples(x, mesh)), my_examples(y, mesh))
    loss.backward()
    return net.norm.bias.grad[0].item(), net.up.bias.grad[0].item()


found = ranks(two_gradients, world=4)
for rank, (of_norm_bias, of_up_bias) in enumerate(found):
    print(f"rank {rank}: norm.bias {of_norm_bias:+.4f}, up.bias {of_up_bias:+.4f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# There are two different numbers for `norm.bias`, one in each tensor group, and four for `up.bias`.
#
# **Replicated: two numbers.** Ranks 0 and 1 have the same gradient of the LayerNorm, because they
# have the same examples, and because `ColumnLinear` has already summed over the tensor group, in
# its backward pass. Ranks 2 and 3 have another one, from other examples. So only the mean over the
# data group is missing. The same is true of `down.bias`: `RowLinear` adds it *after* its sum, so
# each rank finds its whole gradient by itself.
#
# **Sharded: four numbers.** Rank 1's first number belongs to `up.bias[4]`. Adding it to rank 0's,
# which belongs to `up.bias[0]`, would make no sense. But rank 2's belongs to `up.bias[0]`, too, and
# comes from other examples. So again only the mean over the data group is missing.
#
# </details>
#
# We take this mean for ranks 0 and 2, the left column:

# %%
norm_bias_0, up_bias_0 = found[0]
norm_bias_2, up_bias_2 = found[2]
print(f"mean of ranks 0 and 2: norm.bias {(norm_bias_0 + norm_bias_2) / 2:+.4f}, "
      f"up.bias {(up_bias_0 + up_bias_2) / 2:+.4f}")

net = make_net()
F.mse_loss(net(x), y).backward()
print(f"one process:           norm.bias {net.norm.bias.grad[0]:+.4f}, "
      f"up.bias {net.up.bias.grad[0]:+.4f}")

# %% [markdown]
# Both kinds of gradients are therefore summed over the data group, and divided by the number of
# data ranks, not by that of all ranks. The loss is averaged in the same way. (A mean
# of means is right here because each data rank has equally many examples.)
#
# ## The gradient norm: write it before you scroll on
#
# Clipping needs the norm of the *whole* gradient, all parameters together. After the means over the
# data groups, ranks 0 and 2 have equal gradients, and so have ranks 1 and 3. Of a sharded parameter
# a rank has half, of a replicated one it has all. Which squares must be added up?
#
# ### Your turn: the square of the norm
#
# `sharded` and `replicated` are lists of four gradients, those of ranks 0 to 3 on our mesh. Leave
# these gradients as they are.

# %% tags=["fold", "your-turn"]
# define: cases for your function, with gradients of two numbers on each rank
def square_and_gradients(sharded, replicated):
    square = square_of_norm(sharded, replicated)
    return {"returned": square, "given, afterwards": [sharded, replicated]}


first_half = torch.tensor([1.0, 2.0])  # what ranks 0 and 2 have of a sharded parameter
second_half = torch.tensor([3.0, 1.0])  # what ranks 1 and 3 have of it
halves = [first_half, second_half, first_half, second_half]
everywhere = [torch.tensor([10.0, 2.0])] * 4  # what all ranks have of a replicated one
nothing = [torch.zeros(2)] * 4
cases = [
    ((halves, nothing), {"returned": 15, "given, afterwards": [halves, nothing]}),
    ((nothing, everywhere), {"returned": 104, "given, afterwards": [nothing, everywhere]}),
    ((halves, everywhere), {"returned": 119, "given, afterwards": [halves, everywhere]}),
]

# %% tags=["your-turn"]
def square_of_norm(sharded, replicated):
    """The sum of the squares of all numbers of the whole gradient, each counted once."""
    ...


your_turn(square_and_gradients, cases, stubs=[square_of_norm])

# %% [markdown]
# ## The table
#
# Squares of sharded parameters' gradients (in the table: *squares of sharded*) are summed over the
# tensor group, because its ranks have different numbers. They are not summed over the data group,
# because data ranks have equal gradients here, so each square would count twice. Squares of
# replicated parameters' gradients are not summed over any group. So this is the answer to the
# chapter's question:

# %%
TABLE = {
    "gradients of sharded": ["data"],
    "gradients of replicated": ["data"],
    "squares of sharded": ["tensor"],
    "squares of replicated": [],
}

# %% [markdown]
# Three functions do what such a table says. Collectives such as `all_reduce` take a group as an
# argument: then only the ranks of this group take part.

# %%
def add_up(tensor, groups, mesh):
    """The sum over each of these groups, one after another, in place."""
    for name in groups:
        dist.all_reduce(tensor, group=mesh.get_group(name))


def average_gradients(net, table, mesh):
    for name, p in net.named_parameters():
        kind = KIND[name]  # "sharded" or "replicated"
        groups = table["gradients of " + kind]
        add_up(p.grad, groups, mesh)
        p.grad /= mesh["data"].size()


def gradient_norm(net, table, mesh):
    of_sharded = torch.tensor(0.0).double()  # sums of squares
    of_replicated = torch.tensor(0.0).double()
    for name, p in net.named_parameters():
        if KIND[name] == "sharded":
            of_sharded += p.grad.square().sum()
        else:
            of_replicated += p.grad.square().sum()
    add_up(of_sharded, table["squares of sharded"], mesh)
    add_up(of_replicated, table["squares of replicated"], mesh)
    return (of_sharded + of_replicated).sqrt()

# %% [markdown]
# And this is what one rank does, by any such table:

# %%
def train(table, mesh):
    """This rank's network after five steps, and the last step's loss and norm."""
    net = make_net()
    divide(net, mesh)
    for step in range(5):
        net.zero_grad()
        loss = F.mse_loss(net(my_examples(x, mesh)), my_examples(y, mesh))
        loss.backward()
        average_gradients(net, table, mesh)
        norm = gradient_norm(net, table, mesh)
        clip_and_step(net, norm)

    loss = loss.detach()
    add_up(loss, ["data"], mesh)
    loss /= mesh["data"].size()
    return net, loss.item(), norm.item()

# %% [markdown]
# We ask two questions about the four ranks. The first is whether each *matches one process*. A rank
# answers it by itself: it divides the network that one process has trained, and so gets the parts
# that it should have.

# %%
def compare(table, mesh):
    """This rank's weights, whether they match one process, the loss and the norm."""
    net, loss, norm = train(table, mesh)
    found = net.state_dict()

    expected = copy.deepcopy(one_process)
    divide(expected, mesh)
    matches = largest_difference(found, expected.state_dict()) < 1e-12
    return found, matches, loss, norm


def compare_by(table):
    return compare(table, make_mesh())


for rank, (found, matches, loss, norm) in enumerate(ranks(compare_by, TABLE, world=4)):
    print(f"rank {rank}: matches {matches}, loss {loss:.3f}, norm {norm:.3f}")
    assert matches

# %% [markdown]
# The table is right: all four ranks have their parts of one process's weights, and its last loss
# and norm.
#
# The second question can be asked even where no single process can hold the model: do the ranks
# *agree* where they should? The ranks of a data group should have the same numbers everywhere, and
# all four ranks the same replicated parameters.

# %%
def same(name, weights_a, weights_b):
    return largest_difference(weights_a[name], weights_b[name]) < 1e-12


def all_agree(weights):
    """Whether the ranks have the same numbers where they should."""
    rank_0, rank_1, rank_2, rank_3 = weights
    for name in KIND:
        in_columns = same(name, rank_0, rank_2) and same(name, rank_1, rank_3)
        in_a_row = same(name, rank_0, rank_1)
        if not in_columns:
            return False
        if KIND[name] == "replicated" and not in_a_row:
            return False
    return True

# %% [markdown]
# `try_out` asks both questions about a table. It prints rank 0's loss, too, and the norms that
# ranks 0 and 1 have found:

# %%
def try_out(name, table):
    on_ranks = ranks(compare_by, table, world=4)
    weights = []
    match = True
    for found, matches, loss, norm in on_ranks:
        weights.append(found)
        if not matches:
            match = False
    agree = all_agree(weights)
    _, _, loss, norm_0 = on_ranks[0]
    _, _, _, norm_1 = on_ranks[1]
    print(f"{name}: match {match}, agree {agree}, "
          f"loss {loss:.3f}, norms {norm_0:.3f} and {norm_1:.3f}")
    return match, agree


match, agree = try_out("the table", TABLE)
assert match and agree

# %% [markdown]
# ## Broken, entry by entry
#
# Does each entry matter? We change one at a time. The gradients of replicated parameters are the
# same on both ranks of a tensor group. Somebody sums them over all four ranks. **Predict:** do the
# ranks agree afterwards?

# %% tags=["predict"]
table = dict(TABLE)
table["gradients of replicated"] = ["data", "tensor"]
match, agree = try_out("gradients of replicated over both", table)

# %% [markdown]
# <details><summary>What came out</summary>
#
# All ranks agree, on wrong weights: the gradients of the LayerNorm and of `down.bias` are twice as
# large as they should be.
#
# </details>
#
# Next, each rank takes the norm only of what it holds itself, as `nn.utils.clip_grad_norm_` would
# do here. **Predict:** do the ranks agree?

# %% tags=["predict"]
table = dict(TABLE)
table["squares of sharded"] = []
match, agree = try_out("squares of sharded over nothing", table)

# %% [markdown]
# <details><summary>What came out</summary>
#
# They don't. Ranks 0 and 1 find different norms, and scale their gradients by different factors, so
# that replicated parameters, which began equal, drift apart. And the loss is *lower* than the right
# one: every rank finds too small a norm, scales down less, and so takes longer steps.
#
# </details>
#
# These are two of twelve wrong entries, because each of the four rows could have three other lists
# of groups. We make a table for each:

# %%
wrong_tables = {}
for entry in TABLE:
    for groups in [[], ["data"], ["tensor"], ["data", "tensor"]]:
        if groups != TABLE[entry]:
            table = dict(TABLE)
            table[entry] = groups
            wrong_tables[f"{entry}: {groups}"] = table

# %% [markdown]
# **Predict:** how many of the twelve raise an error? After how many do all ranks agree, so that
# comparing them with each other finds nothing? And after how many do they match one process?

# %% tags=["predict"]
answers = {}
for name, table in wrong_tables.items():
    answers[name] = try_out(name, table)

# %% tags=["fold"]
# check: what came out
assert len(answers) == 12
assert [match for match, agree in answers.values()].count(True) == 0
assert [agree for match, agree in answers.values()].count(True) == 6

# %% [markdown]
# <details><summary>What came out</summary>
#
# None raises an error, and none matches one process. After six of the twelve the ranks agree. Four
# of these list both groups, so that all ranks get the same sum. The other two add up squares of
# replicated parameters, which are equal on all ranks anyway.
#
# </details>
#
# A collective doesn't know what it adds up, so it can't complain. The loss doesn't, either: it fell
# with both entries that we broke by hand, and with the second even below the right one. **Only the
# comparison with one process finds every wrong table.** That is why you make it, with a model that
# is small enough, on a mesh with more than one rank in each direction (exercise 2). Best take
# different numbers of data and tensor ranks, because then a division by the wrong one shows. And in
# some steps the norm should be below `LARGEST`: clipping hides a mistake that multiplies all
# gradients by the same factor.
#
# ## The program that you keep
#
# You need not write these sums yourself. [train_transformer.py](train_transformer.py) trains the
# transformer of chapter 17 on a mesh of three dimensions, *data*, *pipeline* (chapter 19) and
# *tensor*, by PyTorch's own parts. On 2 × 2 × 2 ranks each rank is in three groups of two:
#
# ![Eight ranks at the corners of a cube. Its edges are groups of two ranks. Rank 0 is in a data
# group with rank 4, which has other examples, in a pipeline group with rank 2, which has other
# layers, and in a tensor group with rank 1, which has the other half of each
# matrix.](src/drawings/mesh_of_eight.svg)
#
# The program's own `divide` takes three steps. It cuts the network into stages. Then
# `parallelize_module` shards the matrices over the tensor group (chapter 18). Last, `fully_shard`
# (chapter 16) shards all that is left on a rank over the data group, and averages gradients there.
# A parameter is then a DTensor, which knows along which dimensions of the mesh it is sharded, and
# along which replicated. **Predict:** which rows of our table change?

# %% tags=["predict"]
import train_transformer


def who_shards():
    """For each parameter: the dimensions of its mesh, and how it is divided along each."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "pipeline", "tensor"))
    dist.barrier()
    net = train_transformer.Transformer(70, width=64, heads=4, layers=1, tokens=64)
    stage = train_transformer.divide(net, mesh)
    found = {}
    for name, p in stage.named_parameters():
        found[name] = f"on {p.device_mesh.mesh_dim_names}: {p.placements}"
    return found


found = ranks(who_shards, world=4)[0]
for name in ["token.weight", "blocks.0.mlp.down.weight", "blocks.0.mlp.down.bias"]:
    print(name, found[name])

# %% tags=["fold"]
# check: what came out, for all parameters
for how in found.values():
    assert how.startswith("on ('data',")
    assert ": (Replicate" not in how

# %% [markdown]
# <details><summary>What came out</summary>
#
# Every parameter is sharded along *data*, the bias of `down` also replicated along *tensor*. (The
# embedding isn't in the plan for `parallelize_module`, so its mesh has only *data*.) So the last
# two rows change. All squares are summed over data, and squares of what is sharded along *tensor*
# over tensor as well. In our block, where data ranks were equal, these two entries were wrong.
#
# </details>
#
# Each stage of a pipeline has parameters of its own, so all squares are summed over the pipeline,
# too. The program's function `clip` does that. (`whole_loss` takes the loss from the last stages.)
#
# In a terminal, in this folder, the program is started like this:
#
# ```
# torchrun --standalone --nproc-per-node=4 train_transformer.py --data 2 --tensor 2
# ```
#
# It learns the text of the course's `LICENSE`, letter by letter. (To take the program with you,
# take `LICENSE` and [transformer.py](transformer.py), too.) Here it takes five steps in float64 on
# the eight ranks of the drawing, and saves the weights of the whole network:

# %% tags=["trains", "few:DATA = 2=>DATA = 1"]
import tempfile

from helpers.cluster import torchrun

scratch = tempfile.TemporaryDirectory()
saved = f"{scratch.name}/one_mesh.pt"
DATA = 2  # ranks in each dimension
PIPELINE = 2
TENSOR = 2
options = ["--data", DATA, "--pipeline", PIPELINE, "--tensor", TENSOR,
           "--steps", 5, "--float64", "--save", saved]
nproc = DATA * PIPELINE * TENSOR
printed = torchrun("train_transformer.py", nproc=nproc, arguments=options, log=None)
print(printed[0])  # what rank 0 printed

# %% [markdown]
# Now one process takes the same batches, in a loop that knows nothing of meshes:

# %% tags=["fold", "trains"]
# check: one process finds the same loss, gradient norm and weights
from transformer import Transformer

text, vocabulary = train_transformer.read_text()
torch.manual_seed(0)
net = Transformer(vocabulary, width=64, heads=4, layers=4, tokens=64).double()
adam = torch.optim.Adam(net.parameters(), lr=train_transformer.RATE)
for step in range(5):
    letters, next_letters = train_transformer.whole_batch(text, step)
    adam.zero_grad()
    loss = F.cross_entropy(net(letters).flatten(0, 1), next_letters.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), train_transformer.LARGEST_NORM)
    adam.step()

last = f"step {step + 1}: loss {loss:.3f}, norm {norm:.3f}"
print(last)
apart = largest_difference(torch.load(saved), net.state_dict())
print("equal to 1e-12:", apart < 1e-12)
assert last in printed[0]
assert apart < 1e-12

# %% [markdown]
# With `--checkpoint FOLDER` the program saves its state in files after the last step, and with
# `--resume FOLDER --steps 200` another mesh continues from it.
#
# ## On GPUs, and on several machines
#
# For GPUs two lines at the top of the program change (we have run it on CPUs only):
#
# | | here | with GPUs |
# | --- | --- | --- |
# | `BACKEND` | `"gloo"` | `"nccl"` |
# | `DEVICE` | `torch.device("cpu")` | `torch.device("cuda", int(os.environ["LOCAL_RANK"]))` |
#
# On several machines the command changes. On each of two with four GPUs it is:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
#     train_transformer.py --data 2 --tensor 4
# ```
#
# All processes meet at one address, the **rendezvous** (`rdzv`, chapter 15), on `HOST`, which is
# one of the machines. Both machines need the program, `transformer.py` and the same `LICENSE`, and
# must see the folders of `--checkpoint` and `--resume`.
#
# **Which dimension goes inside a machine?** torchrun gives consecutive ranks to the processes of a
# machine (`_assign_worker_ranks` in `torch/distributed/elastic/agent/server/api.py`). So with two
# ranks on each of two machines, ranks 0 and 1 are on the first. What happens if somebody swaps
# the two dimensions of our mesh?

# %%
def train_on(names):
    """The ranks of this rank's tensor group, and the last loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    dist.barrier()
    net, loss, norm = train(TABLE, mesh)
    return dist.get_process_group_ranks(mesh.get_group("tensor")), loss


for names in [("data", "tensor"), ("tensor", "data")]:
    tensor_group, loss = ranks(train_on, names, world=4)[0]
    print(f"{names}: rank 0's tensor group {tensor_group}, loss {loss:.3f}")

# %% [markdown]
# The loss is right on both meshes, because each sum still runs over a group of the right kind. So
# no comparison of numbers finds this mistake. But on the second mesh ranks 0 and 2 are a tensor
# group, one on each machine, and whatever it sends goes between machines. The *last* dimension of a
# mesh has consecutive ranks. So it stays inside a machine, if its size divides the number of ranks
# there.
#
# That is why *tensor* is the last dimension in our program. It sends in every block, forward and
# backward, and the block waits for it (chapter 18). So it needs the fastest links, which are those
# within a machine. For each micro-batch a stage of a pipeline sends hidden states to the next stage
# and a gradient to the previous one. In our program *data* gathers weights and averages gradients
# once in a step, which can overlap with computing (chapters 14 and 16). D. Narayanan et al.
# (arXiv:2104.04473, section 3.2) recommend tensor parallelism up to the number of GPUs in a
# machine, and pipelines over machines.
#
# **What we have not shown.** Processes that share the cores of one machine say nothing about speed,
# so nothing was timed here. Our program has no dropout: with it, ranks of a tensor group
# would need the same random numbers wherever they hold the same hidden states (M. Shoeybi et al.,
# 2019, arXiv:1909.08053, appendix B.2). And in float32 or bfloat16 different meshes give slightly
# different results, much further apart than 1e-12. So run the smallest version of your own mesh on
# CPUs first, in float64, beside one process.

# %% [markdown]
# ## Summary
#
# | | summed over, in our block | in the program, sharded over data |
# | --- | --- | --- |
# | gradients, sharded or replicated | data; divided by data ranks | the same |
# | loss | data; divided by data ranks | data, from last stages |
# | squares, where the parameter is sharded along *tensor* | tensor | data, pipeline, tensor |
# | squares, where it is replicated along *tensor* | nothing | data, pipeline |
#
# - On a mesh each rank is in one group for each dimension, and a collective runs in one of them.
# - A sum over a wrong group need not raise an error, and may leave all ranks with equal, wrong
#   weights. The comparison with one process finds it, on a mesh whose dimensions are larger than
#   one.
# - In the gradient norm, add up the squares of all shards, but count a replicated gradient once.
# - The dimension that sends most often goes inside a machine: the last one of the mesh.
#
# To go on: deeper: Seven ways, computed. There you put in the sizes of your own model and see what
# each way holds and sends, also two that are new, for long sequences and for experts.

# %% [markdown]
# ## Exercises
#
# 1. **With Adam.** Train our block in one process with Adam, at a rate of 0.01 and without
#    clipping, twice: with the right gradients, and with those of all replicated parameters doubled,
#    as in our first wrong entry. How far apart are the weights after five steps? And with SGD? What
#    does that mean for tests?
# 2. **A smaller test.** Somebody tests the table on 2 × 1 ranks, and then on 1 × 2. Which of the
#    twelve wrong entries does a comparison with one process find on each? Is there one that neither
#    finds? (`make_mesh` and `compare` help.)
# 3. **More dimensions, on paper.** Which rows of the table change if a pipeline of two stages is
#    added? And what if the ranks of a tensor group divide the tokens among themselves wherever a
#    LayerNorm computes (*sequence parallelism*)?

# %% [markdown]
# ### Answer to *Your turn*
#
# A sharded gradient counts on both ranks of one tensor group, a replicated one on one rank. (Ranks
# 2 and 3 have the same numbers once more.)

# %% tags=["solution", "your-turn"]
def square_of_norm(sharded, replicated):
    square = replicated[0].square().sum()
    for rank in [0, 1]:  # one tensor group
        square += sharded[rank].square().sum()
    return square


your_turn(square_and_gradients, cases, stubs=[square_of_norm])

# %% [markdown]
# ### Answer 1
#
# Adam divides a running mean of the gradients by the root of a running mean of their squares. A
# factor that is the same in all steps cancels, but for the small number that keeps Adam from
# dividing by zero. So a missing division hides in a test with Adam whose tolerance is that of
# float32. Test with SGD, or compare gradients.

# %% tags=["solution"]
def after_five_steps(make_optimizer, factor):
    net = make_net()
    optimizer = make_optimizer(net.parameters(), lr=0.01)
    for step in range(5):
        net.zero_grad()
        F.mse_loss(net(x), y).backward()
        for name, p in net.named_parameters():
            if KIND[name] == "replicated":
                p.grad *= factor
        optimizer.step()
    return net.state_dict()


for make_optimizer in [torch.optim.Adam, torch.optim.SGD]:
    expected = after_five_steps(make_optimizer, factor=1)
    found = after_five_steps(make_optimizer, factor=2)
    apart = largest_difference(found, expected)
    print(f"{make_optimizer.__name__}: equal to 1e-5: {apart < 1e-5}, to 1e-12: {apart < 1e-12}")

# %% [markdown]
# ### Answer 2
#
# A group of one rank sums nothing. So on 2 × 1 a test can't see whether *tensor* stands in a row,
# and on 1 × 2 it can't see *data*: each misses four. But each of the twelve is found by one of the
# two.

# %% tags=["solution"]
def matches_by_name(data, tensor):
    """For each wrong table: does this rank match one process?"""
    mesh = make_mesh(data, tensor)
    by_name = {}
    for name, table in wrong_tables.items():
        found, matches, loss, norm = compare(table, mesh)
        by_name[name] = matches
    return by_name


missed = {}
for data, tensor in [(2, 1), (1, 2)]:
    rank_0, rank_1 = ranks(matches_by_name, data, tensor, world=2)
    missed[data, tensor] = []
    for name in wrong_tables:
        if rank_0[name] and rank_1[name]:
            missed[data, tensor].append(name)
    print(f"{data} x {tensor} misses", missed[data, tensor])
assert len(missed[2, 1]) == len(missed[1, 2]) == 4
assert not any(name in missed[1, 2] for name in missed[2, 1])

# %% [markdown]
# ### Answer 3
#
# *A pipeline.* Gradients are not summed over it, since each stage has parameters of its own. All
# squares are, since each stage has a part of the whole gradient. The loss is known on the last
# stage only, so the other stages contribute zero, as in `whole_loss` of the program.
#
# *Sequence parallelism.* A tensor rank's LayerNorm then sees only some of the tokens, so its
# gradient is a part of the sum over all tokens. For LayerNorms the row becomes data *and* tensor,
# still divided by the data ranks only. The same goes for `down.bias`, which is then added to this
# rank's tokens only.
