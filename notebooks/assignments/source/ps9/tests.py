"""What solutions of assignment 9 are judged by. See `marking.cases`.

What is expected is what one process finds that has all layers and all examples; each rank's part
is cut from that here.
"""

import numpy as np
import torch
from marking.cases import Anything, Case, Near, Ranks, Wrong, compare, describe, numpy

CLOSE = 1e-12


def send(values):
    """Arrays and lists of them as what can cross."""
    if isinstance(values, (list, tuple)):
        return [send(one) for one in values]
    return numpy(values) if isinstance(values, np.ndarray) else values


def close(values):
    """The same as what is expected."""
    if isinstance(values, (list, tuple)):
        return [close(one) for one in values]
    return None if values is None else Near(numpy(values), CLOSE)


def count_ranks(world):
    return "one rank" if world == 1 else f"{world} ranks"


# Exercise 1

def list_messages(messages):
    return ", ".join(f"{kind} of {numbers}" for kind, numbers in messages) or "nothing"


def look_at(due, stations, counts):
    """A check of the record: the messages `due`, of which so many were sent when a forward pass
    ended."""
    def look(record):
        found = [(one.kind, one.numbers) for one in record]
        if found != due:
            raise Wrong(f"sent: {list_messages(found)} numbers; due: {list_messages(due)}")
        for rank, sent in enumerate(counts):
            for step, (expected, one) in enumerate(zip(stations, sent)):
                if one != expected:
                    raise Wrong(f"rank {rank} had sent {one} messages when forward pass {step + 1} "
                                f"had ended, not {expected}")
    return look


def note(call, rank, counts):
    """The function `note` of the driver: it notes how much the rank has sent by then."""
    def noted(word):
        counts[rank].append(len(call.exchange.record[rank]))
    return noted


def train_whole(layers, steps):
    """What train_layers returns, for one process."""
    both = [[None if array is None else torch.tensor(array, requires_grad=True)
             for array in arrays] for _, *arrays in layers]
    optimizer = torch.optim.SGD([t for pair in both for t in pair if t is not None], lr=0.1)
    history = []
    for x, y in steps:
        x = output = torch.tensor(x, requires_grad=True)
        for i, (weight, bias) in enumerate(both):
            output = torch.nn.functional.linear(torch.tanh(output) if i else output, weight, bias)
        if output.shape == x.shape:
            output = output + x
        optimizer.zero_grad()
        (output - torch.tensor(y)).pow(2).mean().backward()
        gradients = [[t if t is None else t.grad.numpy() for t in pair] for pair in both]
        history.append((output.detach().numpy(), x.grad.numpy(), gradients))
        optimizer.step()
    return history, [[t if t is None else t.detach().numpy() for t in pair] for pair in both]


def cut(layers, pairs, world, rank):
    """A rank's parts of weights and biases."""
    def part(array, axis):
        return None if array is None else np.split(array, world, axis)[rank]
    return [[part(weight, 1), bias] if kind == "row" else [part(weight, 0), part(bias, 0)]
            for (kind, *_), (weight, bias) in zip(layers, pairs)]


def compare_pairs(found, expected, what):
    """Of each layer, what there is of its weight and its bias."""
    compare(found, [(Anything(),) * 2] * len(expected), f"the list of each layer's {what}")
    for i, (pair, due) in enumerate(zip(found, expected)):
        for name, one, one_due in zip(("weight", "bias"), pair, due):
            compare(one, close(one_due), f"{what} of layer {i}'s {name}")


def check_trained(layers, history, after, world, rank, look):
    """A check of what train_layers returns on a rank."""
    def check(found):
        compare(found, (Anything(),) * 2, "what comes back")
        compare(found[0], [(Anything(),) * 3] * len(history), "the list of steps")
        for step, (one, due) in enumerate(zip(found[0], history)):
            at = f"step {step + 1}: the"
            if look == "input":
                compare(one[1], close(due[1]), f"{at} gradient of x")
            else:
                compare(one[0], close(due[0]), f"{at} output")
            compare_pairs(one[2], cut(layers, due[2], world, rank), f"{at} gradient")
        compare_pairs(found[1], cut(layers, after, world, rank), "at the end: the value")
    return check


def trained(what, world, layers, steps, look, wants_x=True):
    """A call of train_layers. look: at "values", the "input"'s gradient, or "messages"."""
    history, after = train_whole(layers, steps)
    counts, call = [[] for _ in range(world)], Ranks(what, [])
    for rank in range(world):
        returns = Anything() if look == "messages" else check_trained(
            layers, history, after, world, rank, look)
        call.cases.append(Case(what, "train_layers", [send(layers), send(steps), wants_x,
                                                      note(call, rank, counts)], returns=returns))
    if look == "messages":
        due, stations = [], []
        for x, _ in steps:
            forward, backward, rows = [], [], x.size // x.shape[-1]
            for i, (kind, weight, _) in enumerate(layers):
                width, inputs = weight.shape
                if kind != "column":
                    forward.append(("all_reduce", rows * width) if kind == "row" else
                                   ("all_gather", rows * width // world))
                if kind != "row" and (wants_x or i):
                    backward.insert(0, ("all_reduce", rows * inputs))
            stations.append(len(due) + len(forward))
            due += forward + backward
        call.messages = look_at(due, stations, counts)
    return call


def make_layers(rng, kinds, widths, without=()):
    """without: numbers of layers that have no bias."""
    return [[kind, rng.normal(size=(n, m)), None if i in without else rng.normal(size=n)]
            for i, (kind, m, n) in enumerate(zip(kinds, widths, widths[1:]))]


def make_steps(rng, layers, sizes):
    """[(x, y), ...] for shapes of x without its last axis."""
    return [[rng.normal(size=(*size, layers[0][1].shape[1])),
             rng.normal(size=(*size, layers[-1][1].shape[0]))] for size in sizes]


PAIR, GATHERED = ["column", "row"], ["gathered"]


def layers_values():
    """Column and row layers: outputs, and the gradients of what they have"""
    rng = np.random.default_rng(91)
    tiny = [["gathered", np.array([[1.0], [3.0]]), np.array([5.0, 6.0])]]
    yield trained("the example above", 2, tiny, [[np.array([[2.0]]), np.array([[6.0, 10.0]])]],
                  "values")
    for what, world, kinds, widths, without, sizes in (
            ("a gathered layer", 2, GATHERED, [3, 4], [], [(5,), (2,)]),
            ("a gathered layer, no bias", 3, GATHERED, [2, 3], [0], [(4,), (4,)]),
            ("column, then row", 2, PAIR, [3, 4, 2], [], [(5,), (3,)]),
            ("column, then row, no biases", 4, PAIR, [2, 8, 3], [0, 1], [(3,), (3,)]),
            ("column, then row, added to x", 3, PAIR, [2, 3, 2], [], [(4,), (1,)]),
            ("column, then row, x of one dimension", 2, PAIR, [3, 2, 1], [], [(), ()]),
            ("gathered, x of three dimensions", 4, GATHERED, [3, 4], [], [(2, 3)]),
            ("column, then row, x of three dimensions", 2, PAIR, [3, 2, 4], [], [(2, 3)]),
            ("column, then row", 1, PAIR, [2, 3, 2], [], [(4,), (4,)])):
        layers = make_layers(rng, kinds, widths, without)
        yield trained(f"{what}, {count_ranks(world)}", world, layers,
                      make_steps(rng, layers, sizes), "values")


def layers_input():
    """Column and row layers: the gradient of the input, and of the layers before"""
    rng = np.random.default_rng(92)
    for what, world, kinds, widths in (
            ("a gathered layer", 2, GATHERED, [3, 4]),
            ("column, then row", 2, PAIR, [3, 4, 2]),
            ("column, then row, added to x", 3, PAIR, [2, 3, 2]),
            ("a gathered layer, added to x", 4, GATHERED, [4, 4]),
            ("two pairs of column and row", 2, PAIR * 2, [3, 4, 2, 6, 1]),
            ("three gathered layers", 3, GATHERED * 3, [2, 3, 6, 3]),
            ("gathered, column, row, gathered", 2, GATHERED + PAIR + GATHERED, [3, 2, 4, 3, 2]),
            ("column, then row", 1, PAIR, [2, 3, 1])):
        layers = make_layers(rng, kinds, widths)
        yield trained(f"{what}, {count_ranks(world)}", world, layers,
                      make_steps(rng, layers, [(3,), (2,)]), "input")


def layers_messages():
    """Column and row layers: which messages are sent, and when"""
    rng = np.random.default_rng(93)
    for what, world, kinds, widths in (
            ("a gathered layer", 2, GATHERED, [3, 4]),
            ("column, then row", 3, PAIR, [2, 6, 4]),
            ("two pairs of column and row", 2, PAIR * 2, [3, 4, 2, 6, 1]),
            ("gathered, column, row", 2, GATHERED + PAIR, [3, 2, 4, 3]),
            ("column, then row", 1, PAIR, [2, 3, 4]),
            ("a gathered layer", 1, GATHERED, [2, 3])):
        layers = make_layers(rng, kinds, widths)
        for wants_x in (True, False):
            yield trained(f"{what}, {count_ranks(world)}, x needs {'a' if wants_x else 'no'} "
                          "gradient", world, layers, make_steps(rng, layers, [(5,), (2, 2)]),
                          "messages", wants_x)
    zeros = [["column", np.zeros((2, 3)), np.zeros(2)], ["row", np.zeros((1, 2)), np.zeros(1)]]
    yield trained("layers of zeros, 2 ranks: a gradient of zeros", 2, zeros,
                  [[np.ones((1, 3)), np.zeros((1, 1))]], "messages")


# Exercise 2

def scheduled(stage, stages, micro_batches, most):
    """A call of steps_of."""
    what = f"stage {stage} of {stages}, micro_batches={micro_batches}, most={most}"
    limit = min(most, stages - stage)

    def check(found):
        if type(found) is not list:
            raise Wrong(f"what is returned is {describe(found)}, not a list")
        forward = backward = 0   # how many have run
        for place, step in enumerate(found):
            at = f"step {place + 1}"
            compare(step, (Anything(),) * 2, at)
            kind, i = step
            if not isinstance(i, (int, np.integer)) or isinstance(i, bool):
                raise Wrong(f"{at} has {describe(i)}, not the number of a micro-batch")
            if type(kind) is not str or kind not in ("forward", "backward"):
                raise Wrong(f"{at} is {describe(kind)}, neither 'forward' nor 'backward'")
            next_one = forward if kind == "forward" else backward
            if i != next_one or i >= micro_batches:
                raise Wrong(f"{at} is the {kind} pass of micro-batch {str(i)[:20]}, after "
                            f"{next_one} of {micro_batches} {kind} passes")
            if kind == "forward":
                forward += 1
                if forward - backward > limit:
                    raise Wrong(f"after {at}, the forward pass of micro-batch {i}, it holds "
                                f"{forward - backward}; it may hold {limit}")
            else:
                if forward < micro_batches and forward - backward < limit:
                    raise Wrong(f"{at} is the backward pass of micro-batch {i}, though it holds "
                                f"{forward - backward} and may hold {limit}")
                backward += 1
        if (forward, backward) != (micro_batches, micro_batches):
            raise Wrong(f"{forward} forward and {backward} backward passes of {micro_batches} "
                        "micro-batches are in the list")

    return Case(what, "steps_of", [stage, stages, micro_batches, most], returns=check)


def schedule_steps():
    """A stage's list: its order, and how many micro-batches it holds"""
    for stages, micro_batches in ((4, 8), (3, 3), (2, 5)):
        for most in (100, 2, 1, 3, stages):
            for stage in range(stages):
                yield scheduled(stage, stages, micro_batches, most)


def schedule_edges():
    """A stage's list: few micro-batches, one stage, many, and what can't be"""
    for given in ((0, 4, 2, 8), (1, 4, 2, 8), (0, 4, 1, 8), (3, 4, 1, 1), (0, 8, 3, 5),
                  (0, 1, 1, 1), (0, 1, 5, 3), (7, 64, 200, 30), (0, 3, 2, 1), (0, 6, 4, 4)):
        yield scheduled(*given)
    for args in ((4, 4, 8, 8), (-1, 4, 8, 8), (0, 0, 8, 8), (0, 4, 0, 8), (0, 4, -1, 8),
                 (0, 4, 8, 0), (0, 4, 8, -2), (5, 4, 0, 0), (3, 2, 1, 1), (0, -1, 1, 1)):
        yield Case(f"steps_of{args}", "steps_of", list(args), raises=ValueError)


# Exercise 3

def check_meshed(means, root, norm):
    """A check of what synchronize_arrays returns: of the norm, or of the gradients."""
    def check(found):
        compare(found, (Anything(),) * 2, "what comes back")
        if norm:
            compare(found[1], Near(root, CLOSE), "the norm")
        else:
            compare(found[0], means, "the list of gradients", ("parameter",))
    return check


def meshed(what, shape, parameters, rng, norm=False):
    """A call of synchronize. parameters: (kind, shape) of each, the shape of the whole."""
    data, tensor = shape
    kinds, found, means, square = [], [[] for _ in range(data * tensor)], [], 0
    for kind, size in parameters:
        parts = rng.normal(size=(data, tensor, *size))   # what is found of the whole parameter
        if kind == "replicated":
            parts = np.repeat(parts[:, :1], tensor, 1)
        whole = parts.sum(1).mean(0) if kind == "partial" else parts[:, 0].mean(0)
        square += (whole**2).sum()
        kinds.append(kind)
        means.append(np.split(whole, tensor) if kind == "sharded" else [whole] * tensor)
        for rank in range(data * tensor):
            row, column = divmod(rank, tensor)
            found[rank].append(np.split(parts[row, 0], tensor)[column] if kind == "sharded"
                               else parts[row, column])
    call = Ranks(what, [])
    for rank in range(data * tensor):
        due = close([one[rank % tensor] for one in means])
        call.cases.append(Case(what, "synchronize_arrays", [send(found[rank]), kinds, shape],
                               returns=check_meshed(due, float(square**0.5), norm)))
    return call


def on_meshes(norm):
    rng = np.random.default_rng(94)
    for shape in ((2, 2), (2, 1), (1, 2), (4, 1), (1, 4), (3, 1), (1, 3), (1, 1)):
        for kinds in (["sharded"], ["replicated"], ["partial"],
                      ["replicated", "sharded", "partial", "sharded", "replicated"]):
            names = " and ".join(kinds) if len(kinds) < 2 else "all kinds"
            sizes = [(12, 2), (3,), (2, 2), (12,), (1, 4)]
            yield meshed(f"a mesh of {shape[0]} x {shape[1]} (data x tensor ranks), {names}", shape,
                         [(kind, (12, 2) if kind == "sharded" else size)
                          for kind, size in zip(kinds, sizes)], rng, norm)


def mesh_gradients():
    """On a mesh: the gradients of the whole batch"""
    return on_meshes(norm=False)


def mesh_norm():
    """On a mesh: the norm of the whole gradient"""
    return on_meshes(norm=True)
