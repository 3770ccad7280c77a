"""A small transformer, and recomputation, which trades time for memory.

    from transformer import Transformer, recompute

    net = Transformer(vocabulary=70, width=64, heads=4, layers=4, tokens=64)
    logits = net(tokens)  # [batch, tokens] -> [batch, tokens, vocabulary]

    y = recompute(block, x)  # block(x), whose activations the backward pass computes anew

Chapter 17 writes both in the open; chapters 18 to 20 divide the network. Needs PyTorch 2.13.
"""

import contextlib
import math

import torch
from torch import nn


class Attention(nn.Module):
    """Each token's mean of the values of the tokens up to it, by several heads.

    `[batch, tokens, width] -> [batch, tokens, width]`. It works with the heads that its matrices
    have: all, or a part of them where the matrices were divided. `join` is the output projection.
    ValueError where `width` doesn't divide by `heads`.
    """

    def __init__(self, width, heads):
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} doesn't divide by heads={heads}")
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(width, width)

    def by_heads(self, x):
        """[batch, tokens, width] -> [batch, heads, tokens, head_width]"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x):
        query = self.by_heads(self.query(x))
        key = self.by_heads(self.key(x))
        value = self.by_heads(self.value(x))
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_width)
        tokens = x.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        return self.join((weights @ value).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices with GELU between them; each token alone."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a norm, and each added to what came in."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """`[batch, tokens]` of token ids -> logits `[batch, tokens, vocabulary]`, causal.

    The logits at a position depend on the tokens up to it, and no later one. A sequence has at
    most `tokens` of them. ValueError where `width` doesn't divide by `heads` or a sequence is
    longer; IndexError, by PyTorch, for a token outside the vocabulary.
    """

    def __init__(self, vocabulary, width, heads, layers, tokens, dropout=0.0):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        count = tokens.shape[1]
        if count > self.place.num_embeddings:
            raise ValueError(f"a sequence of {count} tokens, but the network was built for "
                             f"tokens={self.place.num_embeddings} at most")
        positions = torch.arange(count, device=tokens.device)
        x = self.dropout(self.token(tokens) + self.place(positions))
        x = self.blocks(x)
        return self.output(self.norm(x))


_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, device, *inputs):
        ctx.set_materialize_grads(False)  # None, not zeros, for an output that gets no gradient
        ctx.function = function
        ctx.device = device
        ctx.random_state = _random_state(device)
        ctx.autocast = (torch.is_autocast_enabled(device.type),
                        torch.get_autocast_dtype(device.type))
        ctx.settings = _settings(function)
        ctx.is_tensor = [isinstance(x, torch.Tensor) for x in inputs]
        ctx.others = [x for x in inputs if not isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*[x for x in inputs if isinstance(x, torch.Tensor)])
        outputs = function(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if not isinstance(output, _PLAIN):  # tensors in it would get no gradient
                raise TypeError("recompute: the function must return a tensor or a tuple of them, "
                                "with None, numbers or texts at most among them, not "
                                f"{type(output).__name__}")
        return outputs

    @staticmethod
    def backward(ctx, *output_grads):
        if torch.is_grad_enabled():  # what it returned would count as constant
            raise RuntimeError("recompute: create_graph=True, a gradient of the gradient, is not "
                               "possible")
        if not torch.autograd._is_checkpoint_valid():  # parameters would get gradients unasked
            raise RuntimeError("recompute: call backward() without inputs=, not autograd.grad")
        if _settings(ctx.function) != ctx.settings:
            raise RuntimeError("recompute: train(), eval() or requires_grad_() was called on the "
                               "module between its two forward passes, which would differ")
        tensors = iter(ctx.saved_tensors)
        others = iter(ctx.others)
        inputs = []
        for i, is_tensor in enumerate(ctx.is_tensor):
            if is_tensor:
                x = next(tensors).detach()
                inputs.append(x.requires_grad_(ctx.needs_input_grad[2 + i]))
            else:
                inputs.append(next(others))

        enabled, dtype = ctx.autocast
        with _random_state_of(ctx.random_state, ctx.device), torch.enable_grad(), \
                torch.autocast(ctx.device.type, dtype=dtype, enabled=enabled):
            outputs = ctx.function(*inputs)

        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = []
        for output, grad in zip(outputs, output_grads, strict=True):
            if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None:
                pairs.append((output, grad))
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        grads = [x.grad if isinstance(x, torch.Tensor) else None for x in inputs]
        return None, None, *grads


def _settings(function):
    """What a module's results and gradients depend on besides numbers; () for other functions."""
    if not isinstance(function, nn.Module):
        return ()
    return ([module.training for module in function.modules()],
            [p.requires_grad for p in function.parameters()])


def _random_state(device):
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


@contextlib.contextmanager
def _random_state_of(states, device):
    """As it was when the forward pass began; afterwards the one from before, of both."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.set_rng_state(states[0])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states[1], device)
        yield


def recompute(function, *inputs):
    """`function(*inputs)`, a tensor or a tuple; keeps its inputs and nothing that it computes.

    The backward pass runs `function` once more, with the random state of the first time, so that
    dropout drops the same; the random state outside stays as it was. `function` must do the same
    both times. So what it uses must not change in between: its inputs, also by itself; a module's
    parameters, also by `functional_call`; a loop's variable; a random generator of its own. What
    else it changes, such as BatchNorm's running statistics, it changes twice. After Chen et al.,
    arXiv:1604.06174.

    It is a *reentrant* checkpoint: within the backward pass it starts one of its own, in which the
    parameters that `function` uses get their gradients in `.grad`. Hooks may take the end of this
    one for the end of all, if they ask autograd's engine for it where the network's last layer is
    recomputed; ddp_train.py's `DDP` and PyTorch's don't. Where two calls share a parameter, its
    hooks run once for each. Computed tensors must be inputs, rather than come by a closure or in a
    list.

    ValueError where no input needs a gradient: then nothing would call the backward pass, and the
    parameters would get none. TypeError where `function` returns anything but tensors, None,
    numbers and texts. RuntimeError, from the backward pass, for `create_graph=True`, for
    `autograd.grad` or `backward(inputs=...)`, and where `function` is a module that was set to
    evaluate or frozen in between, or back. Without gradients at all (`torch.no_grad`) it only calls
    `function`.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not any(x.requires_grad for x in tensors):
        raise ValueError("recompute: none of the inputs needs a gradient, so the backward pass "
                         "would never reach it; call x.requires_grad_() on one first, or the "
                         "function itself")
    devices = [x.device for x in tensors if x.device.type not in ("cpu", "meta")]
    return _Recompute.apply(function, devices[0] if devices else torch.device("cpu"), *inputs)
