"""notebooks/tensor_parallel.py on two ranks: as one process, as PyTorch's own, or it says why not.

More ranks, groups of some, and what is rare: tests/tools/test_tensor_parallel_hard.py.
"""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ranks import ranks  # noqa: E402
from tensor_parallel import (  # noqa: E402
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
    copy_to_ranks,
    cross_entropy,
    gather_tokens,
    sum_and_scatter_tokens,
    sum_over_ranks,
)
from torch import nn  # noqa: E402
from transformer import MLP, Transformer  # noqa: E402

COLLECTIVES = ["all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather",
               "reduce_scatter", "broadcast", "all_to_all", "send", "gather", "scatter"]


class Counted:
    """Notes (name, numbers in) of every collective that is called within the block."""

    def __enter__(self):
        self.sent = []
        self.real = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, real in self.real.items():
            setattr(dist, name, self.noting(name, real))
        return self.sent

    def noting(self, name, real):
        def noted(*given, **options):
            source = given[1] if name.endswith("_single") else given[0]
            self.sent.append((name, source.numel()))
            return real(*given, **options)
        return noted

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(dist, name, real)


def random(*shape, seed=0, dtype=torch.float64):
    """The same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mine(whole, dim=0):
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def joined(part, dim):
    """The parts of all ranks, by a way that the module doesn't take."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach())
    return torch.cat(parts, dim)


def near(found, expected, tolerance=1e-12):
    """Both have the same shape and dtype, and differ by no more than rounding."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.isfinite(expected).all()
    bound = tolerance * max(1, expected.abs().max().item())
    assert (found - expected).abs().max().item() <= bound


# --- the four exchanges ---------------------------------------------------------------------------

# name: (function, what ranks 0 and 1 get for x and 10 x, their gradients of x for g and 10 g)
EXCHANGES = {
    "copy_to_ranks": (copy_to_ranks, lambda x: (x, 10 * x), lambda g: (11 * g, 11 * g)),
    "sum_over_ranks": (sum_over_ranks, lambda x: (11 * x, 11 * x), lambda g: (g, 10 * g)),
    "gather_tokens": (gather_tokens, lambda x: (torch.cat([x, 10 * x], 1),) * 2,
                      lambda g: (11 * g).chunk(2, 1)),
    "sum_and_scatter_tokens": (sum_and_scatter_tokens, lambda x: (11 * x).chunk(2, 1),
                               lambda g: (torch.cat([g, 10 * g], 1),) * 2),
}


def numbers(shape, contiguous, dtype):
    whole = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    return whole if contiguous else whole.transpose(0, 2).contiguous().transpose(0, 2)


def exchange(name, batch, contiguous, dtype):
    """Whole numbers, so that all is exact. With a batch of 1 a part of the tokens is contiguous."""
    function, outputs, gradients = EXCHANGES[name]
    rank = dist.get_rank()
    base = numbers([batch, 8, 3], contiguous, dtype)
    x = (base * 10**rank).requires_grad_()
    y = function(x)
    assert torch.equal(y, outputs(base)[rank]) and y.dtype == dtype

    start = numbers(y.shape, contiguous, dtype)
    given = start * 10**rank
    assert given.is_contiguous() == contiguous
    expected = gradients(start)[rank]
    y.backward(given, retain_graph=True)
    assert torch.equal(x.grad, expected)
    y.backward(given)  # adds to what stands there, in place
    assert torch.equal(x.grad, 2 * expected)
    assert torch.equal(given, start * 10**rank), "the gradient that was given has changed"
    assert torch.equal(x, base * 10**rank), "x has changed"

    y = function(x)
    y.sum().backward()  # an expanded gradient: one number, which all entries share
    assert not function(x.detach()).requires_grad


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_and_its_backward_pass(name):
    ranks(exchange, name, 2, False, torch.float64)
    ranks(exchange, name, 1, True, torch.float32)


def any_shape():
    scalar = torch.tensor(3.0, requires_grad=True)
    (2 * sum_over_ranks(copy_to_ranks(scalar))).backward()
    row = sum_over_ranks(torch.arange(5) * 2)  # whole numbers, no gradient
    return scalar.grad.item(), row.tolist()


def test_any_shape_goes_through_copy_and_sum():
    assert ranks(any_shape) == [(4, [0, 4, 8, 12, 16])] * 2


# --- layers ---------------------------------------------------------------------------------------


class Stack(nn.Module):
    """A layer, then a column and a row layer with a function between them, then a layer."""

    def __init__(self, bias, dtype):
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 4)
        self.up = nn.Linear(4, 8, bias=bias)
        self.down = nn.Linear(8, 4, bias=bias)
        self.last = nn.Linear(4, 3)
        self.to(dtype)

    def forward(self, x):
        return self.last(self.down(torch.tanh(self.up(self.first(x)))))


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # which dimension; all others are whole


def stack_as_one(bias, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    whole = Stack(bias, dtype)
    net = copy.deepcopy(whole)
    net.up, net.down = ColumnLinear(net.up), RowLinear(net.down)
    assert net.state_dict().keys() == whole.state_dict().keys()
    before = copy.deepcopy(whole.state_dict())

    x = random(6, 5, 2, dtype=dtype).transpose(0, 2)  # [2, 5, 6], not contiguous
    x_whole = x.clone().requires_grad_()
    x_mine = x.clone(memory_format=torch.preserve_format).requires_grad_()
    expected, found = whole(x_whole), net(x_mine)
    near(found, expected, tolerance)
    expected.square().mean().backward()
    found.square().mean().backward()
    near(x_mine.grad, x_whole.grad, tolerance)
    for name, p in whole.named_parameters():
        grad = net.get_parameter(name).grad
        near(joined(grad, CUT[name]) if name in CUT else grad, p.grad, tolerance)
        assert net.get_parameter(name).is_contiguous()

    torch.optim.SGD(net.parameters(), lr=1.0).step()
    for name, value in before.items():
        assert torch.equal(whole.state_dict()[name], value), "the whole layer has changed"
    shares = net.down.weight.untyped_storage().nbytes()
    assert shares == 4 * 4 * dtype.itemsize, "a part keeps the whole weight alive"
    with torch.no_grad():
        assert net.up(random(4, dtype=dtype)).shape == (4,)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_layers_before_and_behind_are_as_one_process(bias):
    """Output, gradient of the input, all gradients; in float64 and float32."""
    for dtype in [torch.float64, torch.float32]:
        ranks(stack_as_one, bias, dtype)


def embedding_as_one(padding):
    whole = nn.Embedding(6, 3, padding_idx=padding, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(random(6, 3))
    part = VocabularyEmbedding(whole)
    tokens = torch.tensor([[0, 5, 3, 3], [2, 1, 3, 0]]).T  # not contiguous; both ranks' tokens
    weights = random(4, 2, 3, seed=1)
    expected, found = whole(tokens), part(tokens)
    near(found, expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    near(joined(part.weight.grad, 0), whole.weight.grad)
    near(part(tokens.int())[0, 0], whole(tokens)[0, 0])
    near(part(torch.tensor(5)), whole(torch.tensor(5)))


def test_the_embedding_is_as_one_process():
    for padding in [None, 0, 3, 5]:
        ranks(embedding_as_one, padding)


def frozen():
    layer = nn.Linear(4, 4).requires_grad_(False)
    table = nn.Embedding(4, 2).requires_grad_(False)
    parts = [ColumnLinear(layer), RowLinear(layer), VocabularyEmbedding(table)]
    return [p.requires_grad for part in parts for p in part.parameters()]


def test_what_is_frozen_stays_frozen():
    assert ranks(frozen) == [[False] * 5] * 2


# --- the loss -------------------------------------------------------------------------------------


def losses_as_one(scale, offset, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5
    for shape in [(8,), (5, 8), (2, 3, 8)]:
        logits = (scale * random(*shape) + offset).to(dtype)
        labels = torch.arange(logits[..., 0].numel()).mul(3).remainder(8).view(shape[:-1])
        whole = logits.clone().requires_grad_()
        part = mine(logits, -1).clone().requires_grad_()
        expected = F.cross_entropy(whole.view(-1, 8), labels.view(-1))
        with Counted() as sent:
            found = cross_entropy(part, labels)
            (2 * found).backward(retain_graph=True)
        (2 * expected).backward()
        near(found, expected, tolerance)
        near(part.grad, mine(whole.grad, -1), tolerance)
        first = part.grad.clone()
        found.backward()
        near(part.grad, 1.5 * first, tolerance)
        assert torch.equal(part.detach(), mine(logits, -1)), "the logits have changed"
        assert sum(numbers for _, numbers in sent) == 3 * labels.numel()
        assert {name for name, _ in sent} == {"all_reduce"}


@pytest.mark.parametrize("scale, offset", [(1, 0), (300, 0), (1, 5000), (1, -5000)])
def test_the_loss_is_as_one_process_and_sends_three_numbers_a_label(scale, offset):
    for dtype in [torch.float64, torch.float32]:
        ranks(losses_as_one, scale, offset, dtype)


def masked_loss():
    """Rank 1's classes are all masked, as where a vocabulary was filled up."""
    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]]).double()
    part = mine(logits, -1).clone().requires_grad_()
    loss = cross_entropy(part, torch.tensor([1]))
    loss.backward()
    near(loss, F.cross_entropy(logits, torch.tensor([1])))
    assert torch.isfinite(part.grad).all()


def test_masked_classes_have_no_part_in_the_loss():
    ranks(masked_loss)


# --- a whole network ------------------------------------------------------------------------------

TOKENS = torch.arange(30).mul(7).remainder(12).view(3, 10)
COLUMNS = ["attention.query", "attention.key", "attention.value", "mlp.up"]
ROWS = ["attention.join", "mlp.down"]


def make_net():
    torch.manual_seed(0)
    return Transformer(vocabulary=12, width=8, heads=4, layers=2, tokens=10).double()


def divide(net):
    for block in net.blocks:
        for name in COLUMNS:
            block.set_submodule(name, ColumnLinear(block.get_submodule(name)))
        for name in ROWS:
            block.set_submodule(name, RowLinear(block.get_submodule(name)))


def cut_dim(name):
    """Along which dimension a parameter of the transformer is divided, or None."""
    layer, _, kind = name.rpartition(".")
    if layer.endswith(tuple(COLUMNS)):
        return 0
    return 1 if layer.endswith(tuple(ROWS)) and kind == "weight" else None


def whole_of(name, tensor):
    if hasattr(tensor, "full_tensor"):  # PyTorch's
        return tensor.full_tensor()
    dim = cut_dim(name)
    return tensor.detach().clone() if dim is None else joined(tensor, dim)


def five_steps(net, whole_of=lambda name, tensor: tensor.detach().clone()):
    """Logits, loss, gradient of the blocks' input, all gradients; weights after five steps."""
    inputs = []

    def note_gradient(module, args):
        args[0].register_hook(inputs.append)

    net.blocks.register_forward_pre_hook(note_gradient)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    found = {}
    for step in range(5):
        adam.zero_grad()
        logits = net(TOKENS)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        if step == 0:
            found |= {"logits": logits.detach(), "loss": loss.detach(), "input": inputs[0]}
            for name, p in net.named_parameters():
                found[f"gradient of {name}"] = whole_of(name, p.grad)
        adam.step()
    for name, p in net.named_parameters():
        found[name] = whole_of(name, p)
    return found


def network_as_one():
    expected = five_steps(make_net())
    net = make_net()
    divide(net)
    found = five_steps(net, whole_of)
    assert found.keys() == expected.keys()
    for name in expected:
        near(found[name], expected[name])
    return found


def network_by_pytorch():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = make_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return five_steps(net, whole_of)


def test_a_transformer_with_divided_blocks_is_as_one_process_and_as_pytorchs():
    for ours, theirs in zip(ranks(network_as_one), ranks(network_by_pytorch), strict=True):
        for name in ours:
            near(ours[name], theirs[name])


def by_tokens():
    """Norm and dropout's place divided by tokens, with the MLP between gather and scatter."""
    torch.manual_seed(1)
    norm, mlp = nn.LayerNorm(4).double(), MLP(4).double()
    parts = copy.deepcopy(mlp)
    parts.up, parts.down = ColumnLinear(mlp.up), RowLinear(mlp.down)
    x = random(2, 6, 4)
    whole, part = x.clone().requires_grad_(), mine(x, 1).clone().requires_grad_()
    expected = mlp(norm(whole))
    # The layers copy and sum by themselves, so their weights are used without them.
    middle = F.gelu(F.linear(gather_tokens(norm(part)), parts.up.weight, parts.up.bias))
    found = sum_and_scatter_tokens(F.linear(middle, parts.down.weight)) + parts.down.bias
    near(joined(found, 1), expected)
    norm.zero_grad()
    (expected**2).sum().backward()
    (found**2).sum().backward()
    near(joined(part.grad, 1), whole.grad)
    near(joined(parts.up.weight.grad, 0), mlp.up.weight.grad)
    near(joined(parts.down.weight.grad, 1), mlp.down.weight.grad)


def test_cut_by_tokens_outside_the_mlp_it_is_as_one_process():
    ranks(by_tokens)


# --- what is sent ---------------------------------------------------------------------------------


def messages():
    """Of each pass, on the input [2, 6, 4], which is 48 numbers."""
    x = random(2, 6, 4).requires_grad_()
    part = mine(random(2, 6, 4), 1).clone().requires_grad_()
    layer = nn.Linear(4, 8).double()
    back = nn.Linear(8, 4).double()
    table = VocabularyEmbedding(nn.Embedding(6, 4).double())
    calls = {
        "copy": lambda: copy_to_ranks(x),
        "sum": lambda: sum_over_ranks(x),
        "gather": lambda: gather_tokens(part),
        "scatter": lambda: sum_and_scatter_tokens(x),
        "column": lambda: ColumnLinear(layer)(x),
        "row": lambda: RowLinear(back)(mine(layer(x), -1)),
        "embedding": lambda: table(torch.zeros(2, 6, dtype=torch.int64)),
    }
    found = {}
    for name, call in calls.items():
        with Counted() as forward:
            y = call()
        with Counted() as backward:
            y.sum().backward()
        found[name] = (forward, backward)
    with Counted() as forward:
        ColumnLinear(layer)(x.detach()).sum().backward()
    found["column, no gradient"] = (forward, [])
    return found


def test_each_pass_sends_what_the_method_says():
    whole, part = [("all_reduce", 48)], [("all_gather_single", 24)]
    scatter = [("reduce_scatter_single", 48)]
    assert ranks(messages) == [{
        "copy": ([], whole), "sum": (whole, []), "gather": (part, scatter),
        "scatter": (scatter, part), "column": ([], whole), "row": (whole, []),
        "embedding": (whole, []), "column, no gradient": ([], []),
    }] * 2


# --- groups and refusals --------------------------------------------------------------------------


def alone():
    """Each rank is a group of one: all is whole, and nothing of the other comes in."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    group, other = groups[dist.get_rank()], groups[1 - dist.get_rank()]
    torch.manual_seed(0)
    layer, table = nn.Linear(3, 3).double(), nn.Embedding(3, 3).double()
    x = random(1, 5, 3, seed=dist.get_rank()).requires_grad_()
    labels = torch.arange(5)[None] % 3
    for function in [copy_to_ranks, sum_over_ranks, gather_tokens, sum_and_scatter_tokens]:
        y = function(x, group)
        assert torch.equal(y, x)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))
        with pytest.raises(ValueError, match="isn't in this group"):
            function(x, other)
    near(RowLinear(layer, group)(ColumnLinear(layer, group)(x)), layer(layer(x)))
    near(VocabularyEmbedding(table, group)(labels), table(labels))
    near(cross_entropy(x, labels, group), F.cross_entropy(x[0], labels[0]))


def test_a_group_is_asked_and_not_the_world():
    ranks(alone)


def refusals():
    """What is raised by each, and what was sent before."""
    x = random(2, 4, 6)
    labels = torch.zeros(2, 4, dtype=torch.int64)
    table = VocabularyEmbedding(nn.Embedding(6, 3))
    calls = [
        lambda: ColumnLinear(nn.Linear(6, 5)),
        lambda: RowLinear(nn.Linear(5, 6)),
        lambda: VocabularyEmbedding(nn.Embedding(5, 2)),
        lambda: VocabularyEmbedding(nn.Embedding(6, 2, max_norm=1.0)),
        lambda: ColumnLinear(nn.Linear(4, 6).double())(x),
        lambda: RowLinear(nn.Linear(6, 4).double())(x),  # whole, not this rank's part
        lambda: sum_and_scatter_tokens(x[:, :3]),
        lambda: sum_and_scatter_tokens(x[0]),
        lambda: gather_tokens(x[0]),
        lambda: cross_entropy(x, labels[:, :3]),
        lambda: cross_entropy(x, labels.double()),
        lambda: table(labels.double()),
        lambda: table(labels - 1),
        lambda: table(labels + 6),
        lambda: cross_entropy(x, labels + 12),
        lambda: cross_entropy(x, labels - 100),
    ]
    found = []
    with Counted() as sent:
        for call in calls:
            with pytest.raises((ValueError, IndexError)) as caught:
                call()
            found.append(f"{caught.type.__name__}: {caught.value}")
    return found, sent


def test_what_cannot_be_divided_is_refused_on_every_rank_before_anything_is_sent():
    (found, sent), other = ranks(refusals)
    assert other == (found, [])
    assert sent == []
    numbers = ["5", "5", "5", "max_norm", "6", "3", "3", "4, 6", "4, 6", "2, 3", "float64",
               "float64", "-1", "6", "12", "-100"]
    kinds = ["ValueError"] * 12 + ["IndexError"] * 4
    for text, number, kind in zip(found, numbers, kinds, strict=True):
        assert text.startswith(kind) and number in text, text
