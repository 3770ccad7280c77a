"""notebooks/transformer.py: the network as PyTorch's own parts compute it; recompute as the plain
call, bit for bit, and what it keeps."""

import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from transformer import Attention, Transformer, recompute  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def plainly(function, *inputs):
    return function(*inputs)


# --- the network ----------------------------------------------------------------------------


def test_attention_is_pytorchs():
    attention = Attention(width=12, heads=3).double()
    x = torch.randn(2, 5, 12).double()
    query, key, value = (matrix(x).view(2, 5, 3, 4).transpose(1, 2)
                         for matrix in (attention.query, attention.key, attention.value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    theirs = attention.join(mixed.transpose(1, 2).reshape(2, 5, 12))
    assert (attention(x) - theirs).abs().max() < 1e-12


def test_the_whole_network_is_made_of_pytorchs_layers():
    """nn.TransformerEncoder with the norms first and a causal mask, also on a shorter sequence."""
    net = Transformer(vocabulary=7, width=12, heads=3, layers=2, tokens=6).double()
    for p in net.parameters():  # norms, too: new ones are all equal
        nn.init.normal_(p)
    layer = nn.TransformerEncoderLayer(12, 3, 48, 0, F.gelu, batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 2, net.norm, enable_nested_tensor=False).double()
    for block, layer in zip(net.blocks, theirs.layers):
        matrices = [block.attention.query, block.attention.key, block.attention.value]
        own = {"self_attn.in_proj_weight": torch.cat([matrix.weight for matrix in matrices]),
               "self_attn.in_proj_bias": torch.zeros(36)}
        for name, part in [("self_attn.out_proj", block.attention.join), ("norm1", block.norm1),
                           ("norm2", block.norm2), ("linear1", block.mlp.up),
                           ("linear2", block.mlp.down)]:
            own |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        layer.load_state_dict(own)
    tokens = torch.randint(7, (2, 5))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    x = theirs(net.token.weight[tokens] + net.place.weight[:5], mask)
    assert (net(tokens) - net.output(x)).abs().max() < 1e-12


def test_a_logit_knows_the_tokens_up_to_its_own_and_no_later_one():
    net = Transformer(vocabulary=7, width=8, heads=2, layers=2, tokens=5).double()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    before = net(tokens)[0]
    for place in range(5):
        other = tokens.clone()
        other[0, place] = 6
        changed = (net(other)[0] != before).any(dim=1)
        assert changed.tolist() == [each >= place for each in range(5)]


def test_dropout_is_at_the_start_and_at_both_ends_of_a_block():
    net = Transformer(vocabulary=7, width=8, heads=2, layers=3, tokens=5, dropout=1.0)
    seen = []
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, given, x: seen.append(x.abs().sum().item()))
    logits = net(torch.ones(1, 5, dtype=torch.int64))
    assert seen == [0] * 7
    assert torch.equal(logits, net.output(net.norm(torch.zeros(1, 5, 8))))


def test_what_the_network_refuses():
    with pytest.raises(ValueError, match="width=10 .* heads=4"):
        Attention(width=10, heads=4)
    net = Transformer(vocabulary=7, width=8, heads=4, layers=1, tokens=5)
    with pytest.raises(ValueError, match="6 tokens.*tokens=5"):
        net(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(IndexError):
        net(torch.full((1, 5), 7))


# --- recompute ------------------------------------------------------------------------------


def test_a_step_with_dropout_is_the_same_bit_for_bit_nested_too():
    """Loss, gradients, and the random numbers after the step."""
    net = Transformer(vocabulary=7, width=8, heads=2, layers=4, tokens=6, dropout=0.3)
    tokens = torch.randint(7, (3, 6))

    def step(call, call_within):
        torch.manual_seed(1)
        net.zero_grad()
        x = net.dropout(net.token(tokens) + net.place.weight)
        for first in (0, 2):
            def two_blocks(x, first=first):
                for block in net.blocks[first:first + 2]:
                    x = call_within(block, x)
                return x
            x = call(two_blocks, x)
        loss = F.cross_entropy(net.output(net.norm(x)).flatten(0, 1), tokens.flatten())
        loss.backward()
        return [loss, torch.rand(3), *(p.grad for p in net.parameters())]

    expected = step(plainly, plainly)
    for ways in [(recompute, plainly), (plainly, recompute), (recompute, recompute)]:
        assert all(map(torch.equal, step(*ways), expected))


def test_the_random_state_between_the_passes_goes_on():
    """Numbers drawn after the backward pass follow those drawn before it."""
    x = torch.ones(4, requires_grad=True)
    y = recompute(F.dropout, x)
    torch.manual_seed(2)
    drawn = [torch.rand(1)]
    y.sum().backward()
    drawn.append(torch.rand(1))
    torch.manual_seed(2)
    assert torch.equal(torch.cat(drawn), torch.rand(2))


def gradients(call, function, leaves, *others):
    """What backward() leaves, for a loss in which each number of each output counts otherwise."""
    for leaf in leaves:
        leaf.grad = None
    outputs = call(function, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = 0
    for number, output in enumerate(outputs, 1):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            loss = loss + (output * torch.arange(1, output.numel() + 1).view_as(output)
                           ).sum() * number
    loss.backward()
    return [leaf.grad for leaf in leaves]


def test_several_inputs_and_outputs_with_numbers_and_texts_among_them():
    """A tensor twice, one that needs no gradient, one that isn't used, one of whole numbers; an
    output that is an input, one that needs no gradient, one of whole numbers, a text."""
    a = torch.randn(2, 3, requires_grad=True)
    b = torch.randn(3, 2, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    constant = torch.randn(2, 3)
    picked = torch.tensor([1, 0])

    def function(a, again, factor, transposed, constant, picked, unused, word):
        y = (a * again * constant * factor + transposed)[picked]
        return y, a, constant * 2, picked + 1, word

    given = (a, a, 3.0, b.t(), constant, picked, unused, "word")
    leaves = [a, b, unused, constant]
    expected = gradients(plainly, function, leaves, *given)
    found = gradients(recompute, function, leaves, *given)
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert found[2:] == expected[2:] == [None, None]
    outputs = recompute(function, *given)
    assert all(map(torch.equal, outputs[:4], function(*given)[:4])) and outputs[4] == "word"


def test_an_output_without_a_gradient_gives_its_parameters_none():
    """As in a plain call; zeros would count in Adam's means."""
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    y, _ = recompute(lambda x: (used(x), unused(x)), x)
    y.sum().backward()
    assert used.weight.grad is not None and unused.weight.grad is None


def test_frozen_parameters_stay_without_a_gradient_and_the_others_add_theirs_up():
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    x = torch.randn(2, 3, requires_grad=True)
    (expected,) = gradients(plainly, layer, [layer.weight], x)
    layer.weight.grad = torch.ones(3, 3)
    y = recompute(layer, x)
    (y * torch.arange(1, 7).view(2, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, 1 + expected) and layer.bias.grad is None


def test_two_backward_passes_through_one_forward_pass():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.randn(4, 3, requires_grad=True)
    y = recompute(layer, x).sum()
    y.backward(retain_graph=True)
    once = [layer[0].weight.grad.clone(), x.grad.clone()]
    y.backward()
    assert all(map(torch.equal, [layer[0].weight.grad, x.grad], [2 * each for each in once]))


def test_autocast_is_as_it_was_in_the_forward_pass():
    """The backward pass stands outside the block, or in one of its own."""
    layer = nn.Linear(4, 4)
    dtypes = []
    layer.register_forward_hook(lambda layer, given, y: dtypes.append(y.dtype))
    x = torch.randn(3, 4, requires_grad=True)

    def step(call, forward, backward):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
            y = call(layer, x).float().square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
            y.backward()
        return layer.weight.grad

    for forward, backward in [(True, False), (True, True), (False, True)]:
        expected = step(plainly, forward, backward)
        assert torch.equal(step(recompute, forward, backward), expected)
        assert dtypes == [torch.bfloat16 if forward else torch.float32] * 3
        dtypes.clear()


def test_it_keeps_its_inputs_and_nothing_that_it_computes():
    """What autograd keeps is counted; what is kept in any other way would still be alive."""
    net = Transformer(vocabulary=7, width=8, heads=2, layers=1, tokens=6, dropout=0.5)
    within = []
    for module in net.blocks[0].modules():
        module.register_forward_hook(lambda module, given, y: within.append(weakref.ref(y)))
    x = torch.randn(2, 6, 8, requires_grad=True)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = recompute(net.blocks[0], x)
    assert kept == {x.untyped_storage().data_ptr(): 4 * 2 * 6 * 8}
    assert {id(each()) for each in within} <= {id(None), id(y)}
    y.sum().backward()
    assert {id(each()) for each in within} <= {id(None), id(y)}
    del y
    assert {each() for each in within} == {None}


def test_a_layer_is_free_again_before_the_backward_pass_reaches_the_one_below():
    layers = [nn.Linear(3, 3) for _ in range(3)]
    alive = []  # which layers' results exist when another is computed
    results = {}

    def wide(number):
        def function(x):
            alive.append([each for each, ref in results.items() if ref() is not None])
            y = layers[number](x).tanh()
            results[number] = weakref.ref(y)
            return y.exp()
        return function

    x = torch.randn(2, 3, requires_grad=True)
    for number in range(3):
        x = recompute(wide(number), x)
    x.sum().backward()
    assert alive == [[]] * 6


def test_where_it_only_calls_and_what_it_refuses():
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="none of the inputs needs a gradient"):
        recompute(layer, x)
    with torch.no_grad():
        assert torch.equal(recompute(layer, x), layer(x)) and not recompute(layer, x).requires_grad
    x.requires_grad_()
    with pytest.raises(TypeError, match="list"):
        recompute(lambda x: [x, 2 * x], x)
    with pytest.raises(TypeError, match="Namespace"):
        recompute(lambda x: (x, SimpleNamespace(loss=2 * x)), x)
    y = recompute(lambda x: x**3, x).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y, x, create_graph=True)


def test_gradients_for_some_inputs_alone_are_refused_before_any_is_written():
    """Parameters would get theirs, too: an attribution map would count in the next update."""
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    for ask in [lambda y: torch.autograd.grad(y, x), lambda y: y.backward(inputs=[x])]:
        with pytest.raises(RuntimeError, match="without inputs="):
            ask(recompute(layer, x).sum())
        assert layer.weight.grad is None


def test_a_module_that_was_set_otherwise_in_between_is_refused():
    def evaluated(layer):
        layer.eval()

    def unfrozen(layer):
        layer[0].bias.requires_grad_()

    for change in [evaluated, unfrozen]:
        layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        layer[0].bias.requires_grad_(False)
        y = recompute(layer, torch.randn(2, 3, requires_grad=True)).sum()
        change(layer)
        with pytest.raises(RuntimeError, match="between its two forward passes"):
            y.backward()
        assert layer[0].weight.grad is None


def test_it_is_reentrant():
    """As its documentation says: the pass in which a layer's gradients come ends before the others
    are there. When it isn't so any more, that warning can go."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    ready, ready_at_the_end = [], []

    def mark(p):
        if not ready:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: ready_at_the_end.append(len(ready)))
        ready.append(p)

    for layer in layers:
        for p in layer.parameters():
            p.register_post_accumulate_grad_hook(mark)
    recompute(layers[1], layers[0](torch.ones(2, 3))).sum().backward()
    assert ready_at_the_end == [2] and len(ready) == 4
