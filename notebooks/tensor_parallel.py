"""Tensor parallelism: each rank holds a part of large layers, and all work on the same examples.

    from tensor_parallel import ColumnLinear, RowLinear

    mlp.up = ColumnLinear(mlp.up)  # this rank's part of the numbers in the middle
    mlp.down = RowLinear(mlp.down)  # adds up the parts of all ranks

Between a column layer and the row layer after it nothing is sent. All ranks call everything here
in the same order, with the same input unless it says that each has its part, and give a layer the
same `whole`: nothing is copied from rank 0, and nothing compares the ranks. Rank r of k holds the
r-th of k equal parts. `group` is a group of torch.distributed, None is all ranks; a rank is its
place in the group. Nothing changes its arguments, or a gradient that it is given.

ValueError where a size doesn't divide by the number of ranks or doesn't fit, IndexError for a token
or label outside the vocabulary: before anything is sent, and so on every rank if all were given the
same. An input that is wrong on one rank alone raises there, and the others wait for it.

What goes wrong without an error:
- One matrix for queries, keys and values together, in a ColumnLinear: it is cut across them, not
  between heads. Put its outputs in order by heads first.
- Tied weights, such as `output.weight is token.weight`: each layer copies its part, so that they
  are two parameters from then on.
- `clip_grad_norm_`: its norm is that of this rank's parts (chapter 20).
- A DistributedDataParallel whose group has the ranks that share a layer: it copies rank 0's part to
  all. Give it the group of those that hold the same part.
- `load_state_dict` of another rank's file: all ranks' parts have the same names and shapes.

The method is that of M. Shoeybi et al., *Megatron-LM*, arXiv:1909.08053, section 3, where
`copy_to_ranks` is called f and `sum_over_ranks` g. For those that cut tokens see V. Korthikanti et
al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198, section 4.2.
Chapter 18 writes f, g, ColumnLinear and RowLinear in the open. A gradient of a gradient is refused,
by PyTorch. Needs PyTorch 2.13.
"""

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


def _place(group):
    """(this rank's place in the group, how many ranks it has)"""
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {torch.distributed.get_rank()} isn't in this group: only its "
                         "members may call this")
    return rank, torch.distributed.get_world_size(group)


def _my_part(tensor, dim, group):
    """A contiguous copy of this rank's part of `tensor`, cut along `dim`."""
    rank, k = _place(group)
    part = tensor.detach().chunk(k, dim)[rank]
    return part.clone(memory_format=torch.contiguous_format)


def _divide(count, what, group):
    """`count` / the number of ranks."""
    _, k = _place(group)
    if count % k:
        raise ValueError(f"{count} {what} don't divide by {k} ranks")
    return count // k


# --- four exchanges, in two pairs: each is the backward pass of the other -------------------------


def _sum(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


def _gather(x, group):
    _, k = _place(group)
    parts = x.new_empty(k, *x.shape)
    torch.distributed.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, 1).flatten(1, 2)  # [batch, k, tokens/k, width], then together


def _sum_and_scatter(x, group):
    _, k = _place(group)
    parts = x.unflatten(1, (k, x.shape[1] // k)).transpose(0, 1).contiguous()  # [k, batch, ...]
    mine = torch.empty_like(parts[0])
    torch.distributed.reduce_scatter_single(mine, parts.flatten(0, 1), group=group)
    return mine


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _sum_and_scatter(gradient, ctx.group), None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _sum_and_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _gather(gradient, ctx.group), None


def copy_to_ranks(x, group=None):
    """`x`, which is the same on all ranks; backward the sum of all ranks' gradients. Any shape.

    It stands where each rank begins to use `x` in a way of its own: then each finds only its part
    of the gradient, and what comes before needs all of it. Forward nothing is sent, and the result
    shares its memory with `x`.
    """
    _place(group)
    return _Copy.apply(x, group)


def sum_over_ranks(x, group=None):
    """The sum of all ranks' `x`, on every rank; backward the gradient as it is. Any shape.

    What follows is the same on all ranks, so each finds the whole gradient by itself. Backward
    nothing is sent. (`torch.distributed.nn.functional.all_reduce`, deprecated in PyTorch 2.13, adds
    up gradients, too: it differentiates the sum of all ranks' losses, where here all have one and
    the same.)
    """
    _place(group)
    return _Sum.apply(x, group)


def gather_tokens(x, group=None):
    """`[batch, tokens/k, width] -> [batch, tokens, width]`, the parts in the order of the ranks.

    Backward it adds up all ranks' gradients and takes this rank's tokens of the sum. So it stands
    where each rank uses all tokens in a way of its own, instead of `copy_to_ranks`: before a plain
    `nn.Linear` with this rank's outputs. Before a ColumnLinear, or what is the same on all ranks,
    such as the output layer and its loss, the gradient of `x` would be k times the right one.
    Where a rank has a part of the tokens, the gradients of norms and biases are those of its tokens
    only: add them up over the ranks after the backward pass. ValueError where `x` hasn't three
    dimensions.
    """
    _place(group)
    _three_dimensions(x, "gather_tokens")
    return _Gather.apply(x, group)


def sum_and_scatter_tokens(x, group=None):
    """`[batch, tokens, width] -> [batch, tokens/k, width]`: this rank's tokens of the sum.

    Backward it gathers the gradients of all tokens. It stands instead of `sum_over_ranks`: after a
    plain `nn.Linear` with this rank's inputs and no bias. The result of a RowLinear or a
    VocabularyEmbedding is a sum already, and would count k times. ValueError where `x` hasn't three
    dimensions, or its tokens don't divide by the number of ranks.
    """
    _three_dimensions(x, "sum_and_scatter_tokens")
    _divide(x.shape[1], "tokens", group)
    return _SumAndScatter.apply(x, group)


def _three_dimensions(x, name):
    if x.dim() != 3:
        raise ValueError(f"{name} takes [batch, tokens, width], not {list(x.shape)}")


# --- layers ---------------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """This rank's part of the outputs of `whole`, an nn.Linear, from which it copies its weights.

    `x [..., in]`, the same on all ranks, `-> [..., out/k]`. `weight [out/k, in]`, and `bias
    [out/k]` or None. The gradient of `x` is the whole layer's, on every rank, since the forward
    pass begins with `copy_to_ranks`. (In formulas, `x @ A`, these are columns of A; PyTorch stores
    A transposed, so they are rows of `weight`.) ValueError where `out` doesn't divide by the number
    of ranks, or `x` doesn't fit.
    """

    def __init__(self, whole, group=None):
        super().__init__()
        self.group = group
        self.in_features = whole.in_features
        self.out_features = _divide(whole.out_features, "outputs of a ColumnLinear", group)
        self.weight = _parameter(whole.weight, _my_part(whole.weight, 0, group))
        self.bias = None
        if whole.bias is not None:
            self.bias = _parameter(whole.bias, _my_part(whole.bias, 0, group))

    def forward(self, x):
        _last_dimension(x, self.in_features, "all inputs of a ColumnLinear")
        return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """`whole`, an nn.Linear whose inputs are divided among the ranks; it copies its weights.

    `x [..., in/k]`, this rank's part, `-> [..., out]`, the same on all ranks. `weight [out, in/k]`.
    `bias [out]` or None is whole on every rank, and added once, after `sum_over_ranks`, so that its
    gradient is the whole layer's. ValueError where `in` doesn't divide by the number of ranks, or
    `x` doesn't fit.
    """

    def __init__(self, whole, group=None):
        super().__init__()
        self.group = group
        self.in_features = _divide(whole.in_features, "inputs of a RowLinear", group)
        self.out_features = whole.out_features
        self.weight = _parameter(whole.weight, _my_part(whole.weight, 1, group))
        self.bias = None
        if whole.bias is not None:
            self.bias = _parameter(whole.bias, whole.bias.detach().clone())

    def forward(self, x):
        _last_dimension(x, self.in_features, "this rank's inputs of a RowLinear")
        total = sum_over_ranks(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """`whole`, an nn.Embedding of which each rank holds a part of the vocabulary.

    `tokens [...]`, the same on all ranks, `-> [..., width]`: a rank looks up the tokens that it
    has, and the sum over the ranks brings the others. `weight [vocabulary/k, width]`. IndexError
    for a token outside the vocabulary; ValueError where the vocabulary doesn't divide by the number
    of ranks, or where `whole` has options other than `padding_idx`.
    """

    def __init__(self, whole, group=None):
        super().__init__()
        if whole.max_norm is not None or whole.scale_grad_by_freq or whole.sparse:
            raise ValueError("VocabularyEmbedding doesn't know max_norm, scale_grad_by_freq and "
                             "sparse of an nn.Embedding")
        self.group = group
        self.vocabulary = whole.num_embeddings
        size = _divide(self.vocabulary, "tokens of a VocabularyEmbedding", group)
        rank, _ = _place(group)
        self.begin = rank * size
        self.end = self.begin + size
        self.padding = None  # the row whose gradient stays zero, if it is here
        if whole.padding_idx is not None and self.begin <= whole.padding_idx < self.end:
            self.padding = whole.padding_idx - self.begin
        self.weight = _parameter(whole.weight, _my_part(whole.weight, 0, group))

    def forward(self, tokens):
        _whole_numbers_inside(tokens, self.vocabulary, "token")
        elsewhere = (tokens < self.begin) | (tokens >= self.end)
        row = (tokens - self.begin).masked_fill(elsewhere, 0)
        mine = F.embedding(row, self.weight, self.padding)
        mine = mine.masked_fill(elsewhere.unsqueeze(-1), 0)
        return sum_over_ranks(mine, self.group)


def cross_entropy(logits_shard, labels, group=None):
    """The mean cross entropy over a vocabulary of which each rank has a part of the logits.

    `logits_shard [..., vocabulary/k]`, classes last; `labels [...]`, the same on all ranks. Returns
    a tensor without dimensions, the same on all ranks; each rank's gradient is its part of the
    whole's. It is F.cross_entropy of all logits, but sends three numbers a label instead of them:
    the largest logit, the sum of the exponentials and the logit of the label. No label is ignored.

    IndexError for a label outside the vocabulary, -100 too; ValueError for labels that aren't
    whole numbers, or whose shape isn't that of `logits_shard` without its last dimension.
    """
    rank, k = _place(group)
    size = logits_shard.shape[-1]
    if labels.shape != logits_shard.shape[:-1]:
        raise ValueError(f"cross_entropy: logits {list(logits_shard.shape)} need labels "
                         f"{list(logits_shard.shape[:-1])}, not {list(labels.shape)}")
    _whole_numbers_inside(labels, k * size, "label")
    labels = labels.long()

    largest = logits_shard.detach().amax(-1)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits_shard - largest.unsqueeze(-1)  # at most 0, so that no exponential overflows

    elsewhere = (labels < rank * size) | (labels >= (rank + 1) * size)
    column = (labels - rank * size).masked_fill(elsewhere, 0)
    of_label = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    exponentials, of_label = sum_over_ranks(torch.stack([shifted.exp().sum(-1), of_label]), group)
    return (exponentials.log() - of_label).mean()


def _parameter(whole, part):
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _last_dimension(x, size, what):
    if x.shape[-1:] != (size,):
        raise ValueError(f"{what} are {size}, but x is {list(x.shape)}")


def _whole_numbers_inside(numbers, count, what):
    if numbers.is_floating_point():
        raise ValueError(f"a {what} is a whole number, not {numbers.dtype}")
    numbers = numbers.long()  # `count` may be too large for their dtype
    outside = numbers[(numbers < 0) | (numbers >= count)]
    if outside.numel():
        raise IndexError(f"{what} {outside[0].item()} is outside the vocabulary of {count}")
