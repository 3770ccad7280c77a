"""notebooks/tensor_parallel.py in hard cases, on 1 to 4 ranks: as one process, or it says why not.

What most people meet is in tests/programs/test_tensor_parallel.py.
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
from transformer import Transformer, recompute  # noqa: E402

TOKENS = torch.arange(24).mul(7).remainder(12).view(2, 12)


class Model(nn.Module):
    """A transformer of which all but norms and places is divided, with its loss."""

    def __init__(self, group=None, divided=True):
        super().__init__()
        torch.manual_seed(0)
        net = Transformer(vocabulary=12, width=12, heads=12, layers=2, tokens=12).double()
        self.group = group if divided else None
        self.divided = divided
        if divided:
            net.token = VocabularyEmbedding(net.token, group)
            net.output = ColumnLinear(net.output, group)
            for block in net.blocks:
                for layer in [block.attention, block.mlp]:
                    for name, child in list(layer.named_children()):
                        kind = RowLinear if name in ("join", "down") else ColumnLinear
                        setattr(layer, name, kind(child, group))
        self.net = net

    def loss(self):
        logits = self.net(TOKENS)[:, :-1]
        if self.divided:
            return cross_entropy(logits, TOKENS[:, 1:], self.group)
        return F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def train(model, steps=5):
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        adam.zero_grad()
        loss = model.loss()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def same_losses(group=None):
    expected = train(Model(divided=False))
    found = train(Model(group))
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12
    return found


@pytest.mark.parametrize("world", [1, 3, 4])
def test_with_a_divided_vocabulary_too_it_trains_as_one_process(world):
    (first, *others) = ranks(same_losses, world=world)
    assert all(other == first for other in others)


def two_groups():
    """Ranks 0 and 2 train one network while 1 and 3 train another."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group, other = groups[rank % 2], groups[1 - rank % 2]
    same_losses(group)
    x = torch.arange(12.0).view(1, 4, 3) * 10**rank
    pair = x / 10**rank * (101 if rank % 2 == 0 else 1010)
    assert torch.equal(sum_over_ranks(x, group), pair)
    assert torch.equal(sum_and_scatter_tokens(x, group), pair.chunk(2, 1)[rank // 2])
    assert torch.equal(gather_tokens(x, group)[:, :4], x / 10**rank * 10 ** (rank % 2))
    whole = nn.Linear(4, 4)
    assert torch.equal(ColumnLinear(whole, group).weight, whole.weight.chunk(2)[rank // 2])
    for layer in (ColumnLinear, RowLinear):
        with pytest.raises(ValueError, match=f"rank {rank} isn't in this group"):
            layer(whole, other)


def test_two_groups_of_four_ranks_work_side_by_side():
    ranks(two_groups, world=4)


def recomputed():
    """The backward pass runs the block again, its messages too."""
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()
    column, row = ColumnLinear(up), RowLinear(down)
    x = torch.randn(3, 4).double()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    down(torch.tanh(up(a))).square().sum().backward()
    recompute(lambda h: row(torch.tanh(column(h))), b).square().sum().backward()
    assert (a.grad - b.grad).abs().max() < 1e-12
    assert (down.weight.grad.chunk(2, 1)[dist.get_rank()] - row.weight.grad).abs().max() < 1e-12


def test_a_divided_block_can_be_recomputed():
    ranks(recomputed)


def rare():
    x = torch.ones(2, 4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # and not a wrong number
        (grad,) = torch.autograd.grad(sum_over_ranks(copy_to_ranks(x) ** 3).sum(), x,
                                      create_graph=True)
        grad.sum().backward()

    low = torch.ones(2, 4, 4, dtype=torch.bfloat16)
    for function in [copy_to_ranks, sum_over_ranks, gather_tokens, sum_and_scatter_tokens]:
        assert function(low).dtype == torch.bfloat16
    assert sum_over_ranks(torch.ones(0, 3)).shape == (0, 3)

    unlikely = torch.tensor([[0.0, -torch.inf, 1, 2]]).chunk(2, -1)[dist.get_rank()]
    assert cross_entropy(unlikely, torch.tensor([1])).item() == torch.inf
    labels = torch.tensor([[3]], dtype=torch.uint8)
    assert torch.isfinite(cross_entropy(torch.zeros(1, 1, 200), labels))
    assert torch.isfinite(cross_entropy(torch.zeros(1, 1, 128), labels))  # 256 isn't an uint8
    assert torch.isnan(cross_entropy(torch.zeros(0, 2), labels[:0, 0]))  # as PyTorch's

    layer = ColumnLinear(nn.Linear(2, 2))
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    with torch.no_grad():  # what is changed in place later isn't seen in the sum
        y = torch.ones(2)
        total = sum_over_ranks(y)
        y += 1
        assert total.tolist() == [2, 2]


def test_what_is_rare():
    ranks(rare)
