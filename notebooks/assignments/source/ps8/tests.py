"""What solutions of assignment 8 are judged by. See `marking.cases`.

What is expected is what one process finds that has all parameters and all ranks' examples, with
PyTorch's own optimizers; shards are cut from that here.
"""

import numpy as np
import torch
from marking.cases import Anything, Case, Near, Ranks, Whole, Wrong, compare, numpy, read_number

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


def count_shard(arrays, world):
    """Numbers in a shard, rounded up."""
    return -(-sum(array.size for array in arrays) // world)


def cut(arrays, world):
    """Each rank's shard of some arrays."""
    flat = np.zeros(world * count_shard(arrays, world))
    joined = np.concatenate([array.ravel() for array in arrays])
    flat[:len(joined)] = joined
    return np.split(flat, world)


def compare_parts(*parts):
    """A check of a tuple; parts: (what, expected, names) of its entries."""
    def check(found):
        compare(found, (Anything(),) * len(parts), "what comes back")
        for one, (what, expected, *names) in zip(found, parts):
            compare(one, expected, what, names)
    return check


def note(call, rank, counts):
    """The function `note` of the drivers: it notes how much the rank has sent by then."""
    def noted(word):
        counts[rank].append(len(call.exchange.record[rank]))
    return noted


def count_ranks(world):
    return "one rank" if world == 1 else f"{world} ranks"


def describe(messages):
    return ", ".join(f"a{'n' * kind.startswith('a')} {kind} of {numbers}"
                     for kind, numbers in messages) or "nothing"


def look_at(due, stations, counts):
    """A check of the record: the messages `due`, and how many of them were sent at each station,
    a pair (what it is called, how many)."""
    def look(record):
        found = [(one.kind, one.numbers) for one in record]
        for i, (one, expected) in enumerate(zip(found, due)):
            if one != expected:
                raise Wrong(f"message {i + 1} is {describe([one])} numbers, not "
                            f"{describe([expected])}")
        if len(found) != len(due):
            raise Wrong(f"{len(found)} messages were sent, not {len(due)}; the last ones: "
                        f"{describe(found[-3:])} numbers")
        for rank, sent in enumerate(counts):
            for (what, expected), one in zip(stations, sent):
                if one != expected:
                    raise Wrong(f"rank {rank} had sent {one} messages {what}, not {expected}")
    return look


# Exercise 1

def update_all(arrays, kind, options, ranks):
    """[arrays after each step] in one process. ranks: [rank][step] -> (clear, gradients)."""
    tensors = [torch.tensor(array) for array in arrays]
    optimizer = getattr(torch.optim, kind)(tensors, **options)
    history, held = [], [np.zeros_like(array) for array in arrays]   # gradients, summed over ranks
    for parts in zip(*ranks):
        if parts[0][0]:
            held = [np.zeros_like(array) for array in arrays]
        for _, gradients in parts:
            held = [a if g is None else a + g for a, g in zip(held, gradients)]
        for tensor, total in zip(tensors, held):
            tensor.grad = torch.tensor(total / len(ranks))
        optimizer.step()
        history.append([tensor.numpy().copy() for tensor in tensors])
    return history


def sharded(what, arrays, kind, options, ranks, values=True, inside=False, sent=False, stay=False):
    """A call of ShardedOptimizer. values, inside, sent, stay: what is looked at, the last being
    whether gradients stay as they are."""
    world, steps = len(ranks), len(ranks[0])
    history = update_all(arrays, kind, options, ranks)
    size = count_shard(arrays, world)
    copies = {"SGD": bool(options.get("momentum")), "Adam": 2, "AdamW": 2}[kind]
    counts, call = [[] for _ in ranks], Ranks(what, [])
    for rank, parts in enumerate(ranks):
        due = [("the parameters", close(history) if values else Anything(), "step", "parameter"),
               ("whether a step leaves gradients as they are", Anything()),
               ("what is inside", Anything())]
        shard = cut(history[-1], world)[rank]
        call.cases.append(Case(
            what, "train_sharded",
            [send(arrays), kind, options, send(parts), inside, note(call, rank, counts)],
            returns=check_sharded(due, [[Anything()] * len(arrays)] * steps if stay else Anything(),
                                  (kind, size, copies, shard) if inside else None)))
    if sent:
        messages = [("reduce_scatter", world * size), ("all_gather", size)] * steps
        call.messages = look_at(messages, [(f"before its step {step + 1}", 2 * step)
                                           for step in range(steps)], counts)
    return call


def check_sharded(due, stay, inside):
    """A check of what train_sharded returns. stay: a list for each step, where the gradients are
    looked at. inside: what there should be."""
    def check(found):
        compare_parts(*due)(found)
        compare(found[1], stay, "the list of gradients that stay")
        for step, left in enumerate(found[1] if isinstance(stay, list) else []):
            if left != [True] * len(left):
                raise Wrong(f"step {step + 1} changed a gradient: whether each of them stayed as "
                            f"it was is {left}")
        if inside:
            check_inside(found[2], *inside)
    return check


def check_inside(found, kind, size, copies, shard):
    compare(found, (Anything(),) * 4, "what is told of `.inner`")
    name, shapes, numbers, values = found
    if name != kind:
        raise Wrong(f"`.inner` is of another class than {kind}")
    compare(shapes, [(size,)], "the list of shapes that `.inner` updates")
    if numbers != [size] * copies:
        raise Wrong(f"`.inner` has a state of {str(numbers)[:60]} numbers, and the shard has {size}")
    compare(values, Near(numpy(shard), CLOSE), "the tensor in `.inner`")


def make_gradients(rng, arrays, world, steps, missing=()):
    """[rank][step] -> [True, gradients]. missing: (rank, step, parameter) of those that are None;
    None for all ranks, or all steps."""
    return [[[True, [None if any(r in (rank, None) and s in (step, None) and p == i
                                 for r, s, p in missing) else rng.normal(size=array.shape)
                     for i, array in enumerate(arrays)]] for step in range(steps)]
            for rank in range(world)]


def make_arrays(rng, *shapes):
    return [np.array(rng.normal(size=shape)) for shape in shapes]


def sharded_values():
    """A sharded optimizer: the parameters after each step"""
    rng = np.random.default_rng(81)
    small = [np.array([1.0, 2.0]), np.array(3.0)]
    yield sharded("the example above", small, "SGD", {"lr": 1.0}, [
        [[True, [np.ones(2), np.array(1.0)]]], [[True, [np.array([3.0, 5.0]), None]]]])
    for world, kind, options, shapes in (
            (2, "SGD", {"lr": 0.3, "momentum": 0.9}, [(3, 2), (2,), ()]),
            (3, "Adam", {"lr": 0.1}, [(2, 5), (1,), (5,)]),
            (4, "AdamW", {"lr": 0.1, "weight_decay": 0.3}, [(), (3, 3), (2, 1, 2)]),
            (2, "Adam", {"lr": 0.1, "betas": [0.5, 0.9], "eps": 0.01}, [(4, 4), (4,)]),
            (1, "Adam", {"lr": 0.1}, [(2, 3), ()])):
        arrays = make_arrays(rng, *shapes)
        yield sharded(f"{kind}, {count_ranks(world)}, four steps", arrays, kind, options,
                      make_gradients(rng, arrays, world, 4))
    arrays = make_arrays(rng, (2, 2), (3,), (2,))
    for what, missing in (("on one of three ranks", [(1, 0, 1), (1, 2, 0)]),
                          ("on all ranks in the second step", [(None, 1, 1)]),
                          ("on all ranks in all steps", [(None, None, 2)]),
                          ("on all ranks in the first step", [(None, 0, 0)])):
        yield sharded(f"three ranks, a gradient that is None {what}", arrays, "SGD",
                      {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
                      make_gradients(rng, arrays, 3, 3, missing))
    for world, what, (rank, step) in ((2, "on one of two ranks all gradients are None", (0, None)),
                                      (2, "in the first step all gradients are None", (None, 0)),
                                      (3, "in the second step all gradients are None", (None, 1))):
        yield sharded(f"{world} ranks, {what}", arrays, "SGD",
                      {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
                      make_gradients(rng, arrays, world, 3, [(rank, step, i) for i in range(3)]))


def sharded_messages():
    """A sharded optimizer: two messages a step"""
    rng = np.random.default_rng(82)
    for world, shapes, missing in (
            (2, [(2,), ()], []), (3, [(2, 5), (1,), (3,)], [(0, 1, 0)]), (4, [(4, 4)], []),
            (4, [(1,), ()], [(None, None, 0)]), (1, [(3,), (2, 2)], [])):
        arrays = make_arrays(rng, *shapes)
        yield sharded(f"{count_ranks(world)}, {sum(a.size for a in arrays)} numbers, three steps",
                      arrays, "SGD", {"lr": 0.1, "momentum": 0.5},
                      make_gradients(rng, arrays, world, 3, missing), values=False, sent=True)


def sharded_care():
    """A sharded optimizer: what is inside, awkward sizes, gradients that stay, no parameters"""
    rng = np.random.default_rng(83)
    for world, kind, options, shapes in (
            (2, "SGD", {"lr": 0.1, "momentum": 0.9}, [(3, 2), (3,)]),
            (3, "Adam", {"lr": 0.1}, [(2, 2), (), (3,)]),
            (4, "AdamW", {"lr": 0.1, "weight_decay": 0.5}, [(3,)]),
            (4, "Adam", {"lr": 0.1}, [()]),
            (3, "SGD", {"lr": 0.1}, [(2, 3)])):
        arrays = make_arrays(rng, *shapes)
        yield sharded(f"inside, {kind}, {world} ranks, {sum(a.size for a in arrays)} numbers",
                      arrays, kind, options, make_gradients(rng, arrays, world, 2), inside=True)
    for world in (3, 4):
        for shapes in ([(2,)], [(), ()], [(1, 1), (), (3,)]):
            arrays = make_arrays(rng, *shapes)
            yield sharded(f"{world} ranks, {sum(a.size for a in arrays)} numbers", arrays, "Adam",
                          {"lr": 0.1}, make_gradients(rng, arrays, world, 2))
    arrays = make_arrays(rng, (2, 2), (3,))
    ranks = make_gradients(rng, arrays, 2, 3)
    for parts in ranks:
        parts[1][0] = False
    yield sharded("two ranks, gradients are not cleared before the second step", arrays, "SGD",
                  {"lr": 0.1}, ranks)
    yield sharded("two ranks, gradients stay as they are, None too", arrays, "SGD", {"lr": 0.1},
                  make_gradients(rng, arrays, 2, 3, [(0, 1, 0), (1, None, 1)]), values=False,
                  stay=True)
    for what, inside in (("no parameters", False), ("a list of no parameters", True)):
        yield Ranks(what, [Case(what, "train_sharded", [[], "SGD", {"lr": 0.1}, [], inside, ignore],
                                raises=ValueError) for _ in range(2)])


def ignore(word):
    pass


# Exercise 2

def make_layers(rng, widths, without_bias=()):
    return [[rng.normal(size=(b, a)) / np.sqrt(a),
             None if i in without_bias else rng.normal(size=b)]
            for i, (a, b) in enumerate(zip(widths, widths[1:]))]


def list_arrays(layer):
    return [array for array in layer if array is not None]


def apply(layers, x):
    """layers: [[weight, bias or None], ...], tensors."""
    for i, (weight, bias) in enumerate(layers):
        x = (torch.tanh(x) if i else x) @ weight.T
        x = x if bias is None else x + bias
    return x


def train(layers, frozen, kind, options, ranks):
    """([rank] -> outputs, [rank] -> gradients of x, [step] -> gradients of each layer, layers at
    the end) in one process. ranks: [rank][step] -> list of (x, y)."""
    tensors = [[None if a is None else torch.tensor(a, requires_grad=i not in frozen)
                for a in layer] for i, layer in enumerate(layers)]
    trained = [t for layer in tensors for t in layer if t is not None and t.requires_grad]
    optimizer = getattr(torch.optim, kind)(trained, **options)
    outputs, of_x, history = [[] for _ in ranks], [[] for _ in ranks], []
    for step in range(len(ranks[0])):
        optimizer.zero_grad()
        for rank, steps in enumerate(ranks):
            for x, y in steps[step]:
                x = torch.tensor(x, requires_grad=True)
                output = apply(tensors, x)
                loss = (output - torch.tensor(y)).pow(2).mean()
                (loss / len(ranks)).backward()
                outputs[rank].append(output.detach().numpy())
                of_x[rank].append(x.grad.numpy() * len(ranks))
        history.append([None if i in frozen else [t.grad.numpy().copy() for t in list_arrays(layer)]
                        for i, layer in enumerate(tensors)])
        optimizer.step()
    ends = [[t.detach().numpy() for t in list_arrays(layer)] for layer in tensors]
    return outputs, of_x, history, ends


def list_messages(layers, frozen, wants_x, world):
    """(of a forward pass, of a backward pass)."""
    sizes = [count_shard(list_arrays(layer), world) for layer in layers]
    backward = []
    for i in reversed(range(len(layers))):
        if wants_x or any(j not in frozen for j in range(i)):
            backward.append(("all_gather", sizes[i]))
        if i not in frozen:
            backward.append(("reduce_scatter", world * sizes[i]))
    return [("all_gather", size) for size in sizes], backward


def linear(what, layers, ranks, kind="SGD", options=None, frozen=(), wants_x=True, values=True,
           sent=False):
    """A call of train_layers. values, sent: what is looked at."""
    options, world = options or {"lr": 0.2}, len(ranks)
    outputs, of_x, history, ends = train(layers, frozen, kind, options, ranks)
    counts, call = [[] for _ in ranks], Ranks(what, [])
    for rank, steps in enumerate(ranks):
        gradients = [[None if one is None else cut(one, world)[rank] for one in step]
                     for step in history]
        due = [("the outputs", close(outputs[rank]), "pass"),
               ("the gradients of x",
                close(of_x[rank] if wants_x else [None] * len(of_x[rank])), "pass"),
               ("the gradients of shards", close(gradients), "step", "layer"),
               ("the shards at the end", close([cut(one, world)[rank] for one in ends]), "layer")]
        call.cases.append(Case(
            what, "train_layers", [send(layers), list(frozen), kind, options, send(steps), wants_x,
                                   note(call, rank, counts)],
            returns=compare_parts(*due) if values else compare_parts(
                *((name, Anything()) for name, *_ in due))))
    if sent:
        forward, backward = list_messages(layers, frozen, wants_x, world)
        passes = sum(map(len, ranks[0]))
        per = len(forward) + len(backward)
        call.messages = look_at((forward + backward) * passes, [
            (f"when its forward pass {i + 1} had ended", per * i + len(forward))
            for i in range(passes)], counts)
    return call


def inferred(what, layers, xs, values=True, sent=False):
    """A call of infer. xs: the input of each rank."""
    world, counts, call = len(xs), [[] for _ in xs], Ranks(what, [])
    tensors = [[None if a is None else torch.tensor(a) for a in layer] for layer in layers]
    doubled = [[None if a is None else numpy(2 * a) for a in layer] for layer in layers]
    for rank, x in enumerate(xs):
        due = [("the output", close(apply(tensors, torch.tensor(x)).numpy())),
               ("what unshard() returns", doubled, "layer")]
        if not values:
            due = [(name, Anything()) for name, *_ in due]
        call.cases.append(Case(what, "infer", [send(layers), numpy(x), note(call, rank, counts)],
                               returns=compare_parts(*due)))
    if sent:
        forward, _ = list_messages(layers, [], False, world)
        call.messages = look_at(forward * 2, [("when its forward pass had ended", len(forward))],
                                counts)
    return call


def used(what, layer, ranks, values=True, sent=False):
    """A call of use. ranks: [rank][pass] -> (x, how often it comes through the layer, whether x
    needs a gradient, whether the shard does). values, sent: what is looked at."""
    world = len(ranks)
    tensors = [None if a is None else torch.tensor(a, requires_grad=True) for a in layer]
    there = [t for t in tensors if t is not None]
    outputs, of_x, of_shard = [[] for _ in ranks], [[] for _ in ranks], []
    for parts in zip(*ranks):
        for rank, (x, times, wants_x, trained) in enumerate(parts):
            x = torch.tensor(x, requires_grad=True)
            output = apply([tensors] * times, x)
            gradient, *found = torch.autograd.grad(output.pow(2).mean(), [x, *there])
            outputs[rank].append(output.detach().numpy())
            of_x[rank].append(gradient.numpy() if wants_x else None)
            for t, one in zip(there, found):
                if trained:
                    t.grad = one / world if t.grad is None else t.grad + one / world
        of_shard.append([None] * world if there[0].grad is None
                        else cut([t.grad.numpy() for t in there], world))
    counts, call = [[] for _ in ranks], Ranks(what, [])
    for rank, passes in enumerate(ranks):
        due = [("the outputs", close(outputs[rank]), "pass"),
               ("the gradients of x", close(of_x[rank]), "pass"),
               ("the gradients of the shard", close([one[rank] for one in of_shard]), "pass")]
        if not values:
            due = [(name, Anything()) for name, *_ in due]
        call.cases.append(Case(what, "use", [*send(layer), send(passes), note(call, rank, counts)],
                               returns=compare_parts(*due)))
    if sent:
        size, messages, stations = count_shard(list_arrays(layer), world), [], []
        for number, (_, times, wants_x, trained) in enumerate(ranks[0]):
            messages += [("all_gather", size)] * times
            stations.append((f"when its forward pass {number + 1} had ended", len(messages)))
            for place in reversed(range(times)):
                messages += [("all_gather", size)] * (wants_x or trained and place > 0)
                messages += [("reduce_scatter", world * size)] * trained
        call.messages = look_at(messages, stations, counts)
    return call


# Whether x needs a gradient, and whether the shard does, from pass to pass.
CHANGES = ((True, True), (False, True), (True, False), (False, False), (True, True))
CHANGES_ARE = "what needs a gradient changes: both, the shard, x, nothing, both"


def make_pieces(rng, layers, sizes):
    """[(x, y), ...] for shapes of x without its last axis."""
    return [[rng.normal(size=(*size, layers[0][0].shape[1])),
             rng.normal(size=(*size, layers[-1][0].shape[0]))] for size in sizes]


def linear_values():
    """A sharded layer: outputs, gradients and weights"""
    rng = np.random.default_rng(84)
    one = np.ones((1, 1))
    yield linear("the example above", [[2 * one, np.ones(1)]],
                 [[[[one, 2 * one]]], [[[3 * one, 5 * one]]]], options={"lr": 0.5})
    for what, world, widths, without, steps, more in (
            ("two ranks, one layer", 2, [3, 2], [], [[(4,)], [(2,)]], {}),
            ("three ranks, no bias", 3, [2, 4], [0], [[(3,)], [(2,)]], {}),
            ("four ranks, two layers, Adam", 4, [3, 4, 2], [], [[(2,)]] * 3,
             {"kind": "Adam", "options": {"lr": 0.1}}),
            ("two ranks, two layers, momentum, two pieces a step", 2, [3, 5, 1], [1],
             [[(2,), (3,)]] * 2, {"options": {"lr": 0.1, "momentum": 0.5}}),
            ("one rank, two layers", 1, [2, 3, 2], [], [[(2,)]] * 2, {}),
            ("four ranks, fewer numbers than that", 4, [1, 1], [], [[(2,)]] * 2, {}),
            ("two ranks, x without other axes, and with two", 2, [3, 2], [], [[(), (2, 3)]], {}),
            ("three ranks, the first layer is frozen", 3, [2, 3, 2], [], [[(3,)]] * 2,
             {"frozen": [0]}),
            ("two ranks, x needs no gradient", 2, [2, 3, 2], [], [[(3,), (1,)]] * 2,
             {"wants_x": False})):
        layers = make_layers(rng, widths, without)
        yield linear(what, layers, [[make_pieces(rng, layers, sizes) for sizes in steps]
                                    for _ in range(world)], **more)
    for world, widths, without in ((2, [3, 2, 4], [0]), (3, [2, 2], []), (4, [1, 1], [0])):
        layers = make_layers(rng, widths, without)
        yield inferred(f"{world} ranks, without gradients, then unshard()", layers,
                       rng.normal(size=(world, 3, widths[0])))


    for world, without in ((2, []), (3, [0])):
        (layer,) = make_layers(rng, [3, 3], without)
        yield used(f"{world} ranks, a pass that comes twice through the layer, once, three times",
                   layer, [[[rng.normal(size=(n, 3)), times, True, True]
                            for n, times in ((2, 2), (1, 1), (4, 3))] for _ in range(world)])
        yield used(f"{world} ranks, {CHANGES_ARE}", layer, [
            [[rng.normal(size=(2, 3)), 1, *wants] for wants in CHANGES] for _ in range(world)])


def linear_messages():
    """A sharded layer: which messages are sent, and when"""
    rng = np.random.default_rng(85)
    for what, world, widths, without, more in (
            ("two ranks, one layer", 2, [3, 2], [], {}),
            ("three ranks, one layer, no bias", 3, [2, 5], [0], {}),
            ("one rank, one layer", 1, [2, 2], [], {}),
            ("two ranks, x needs no gradient", 2, [3, 2], [], {"wants_x": False}),
            ("four ranks, two layers", 4, [3, 4, 2], [1], {}),
            ("two ranks, two layers, x needs no gradient", 2, [3, 4, 2], [], {"wants_x": False}),
            ("two ranks, the second layer is frozen", 2, [2, 3, 2], [], {"frozen": [1]}),
            ("three ranks, the first layer is frozen, x needs no gradient", 3, [2, 3, 2], [],
             {"frozen": [0], "wants_x": False})):
        layers = make_layers(rng, widths, without)
        yield linear(what, layers, [[make_pieces(rng, layers, sizes) for sizes in ([(2,), (3,)],
                                                                                  [(1,)])]
                                    for _ in range(world)], values=False, sent=True, **more)
    for world, widths in ((2, [3, 2]), (3, [2, 3, 2])):
        layers = make_layers(rng, widths)
        yield inferred(f"{world} ranks, without gradients, then unshard()", layers,
                       rng.normal(size=(world, 3, widths[0])), values=False, sent=True)
    yield linear("two ranks, a layer of zeros and targets of 0: gradients of zeros",
                 [[np.zeros((2, 2)), np.zeros(2)]], [[[[np.ones((1, 2)), np.zeros((1, 2))]]]] * 2,
                 values=False, sent=True)
    (layer,) = make_layers(rng, [3, 3])
    yield used(f"two ranks, twice through the layer, {CHANGES_ARE}", layer, [
        [[rng.normal(size=(2, 3)), 2, *wants] for wants in CHANGES] for _ in range(2)],
        values=False, sent=True)


def linear_forgets():
    """A sharded layer: what it keeps between its passes"""
    rng = np.random.default_rng(86)
    for world, shape, bias in ((3, (128, 160), True), (4, (150, 120), False)):
        what = f"{world} ranks, a weight of {shape[0]} x {shape[1]}" + ", no bias" * (not bias)
        weight, b = rng.normal(size=shape), rng.normal(size=shape[0]) if bias else None
        nbytes = 8 * count_shard(list_arrays([weight, b]), world)
        yield Ranks(what, [Case(what, "keep", [send(weight), send(b), numpy(rng.normal(
            size=(1, shape[1])))], returns=check_kept(nbytes, weight.nbytes))
            for _ in range(world)])


WHEN = ("when it is made", "before the backward pass", "after the backward pass",
        "after a pass without gradients", "after unshard()")


def check_kept(nbytes, whole):
    """A check of what keep returns. nbytes: the shard's. whole: the weight's."""
    most = nbytes + whole // 8   # a second shard may be kept, and Python has objects of its own

    def check(found):
        compare(found, (Anything(),) * 4, "what comes back")
        names, shard, memory, more = found
        if names != ["shard"]:
            raise Wrong(f"the module's parameters and buffers are {str(names)[:80]}, not `shard` "
                        "alone")
        if shard != nbytes:
            raise Wrong(f"the shard has {str(shard)[:20]} bytes, not {nbytes}")
        if memory != nbytes:
            raise Wrong(f"the shard, of {nbytes} bytes, lies in a memory of {str(memory)[:20]}: it "
                        "keeps the whole alive")
        compare(more, [Anything()] * len(WHEN), "the list of bytes that are kept")
        for count, when in zip(more, WHEN):
            if read_number(count) > most:
                raise Wrong(f"{count} bytes besides shard, x, output and gradients are kept {when}; "
                            f"the whole weight has {whole}")
    return check


# Exercise 3

HUGE = 10**24 + 7


def count_bytes(numbers, ranks, stage):
    shard = -(-numbers // ranks)
    return {0: 16 * numbers, 1: 4 * numbers + 12 * shard, 2: 2 * numbers + 14 * shard,
            3: 16 * shard}[stage]


def count_numbers(limit, ranks, stage):
    """As many full rounds of one number for each rank as fit, and what fits into one more."""
    whole, shared = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    rounds, left = divmod(limit, whole * ranks + shared)
    room = left - shared
    more = 0 if room < 0 else min(ranks - 1, room // whole) if whole else ranks - 1
    return rounds * ranks + more


def memory_bytes():
    """What fits: the bytes that a rank holds"""
    for numbers, ranks in ((10, 4), (12, 4), (1, 3), (0, 5), (7, 1), (7_500_000_000, 64),
                           (HUGE, 8), (HUGE, 3), (2**53 + 1, 1), (3, 1000)):
        for stage in range(4):
            yield Case(f"memory({numbers}, {ranks}, {stage})", "memory", [numbers, ranks, stage],
                       returns=Whole(count_bytes(numbers, ranks, stage)))
    for args in ((-1, 2, 1), (5, 0, 3), (5, -2, 0), (5, 0, 0), (5, 2, 4), (5, 2, -1), (0, 2, 5),
                 (0, 0, 0), (0, -1, 3), (5, 1, 4), (0, 1, -1), (-1, 1, 0), (-1, 1, 3), (-1, 2, 0),
                 (-1, 2, 3), (5, 0, 1), (5, 0, 2)):
        yield Case(f"memory{args}", "memory", list(args), raises=ValueError)


def memory_most():
    """What fits: the largest model"""
    for ranks in (1, 4, 3):
        for stage in range(4):
            for limit in (*range(0, 40, 3), 15, 16, 17, 47, 48, 62, 75, 76, 159, 160):
                yield Case(f"most({limit}, {ranks}, {stage})", "most", [limit, ranks, stage],
                           returns=Whole(count_numbers(limit, ranks, stage)))
    for limit, ranks in ((24 * 2**30, 8), (80 * 10**9, 1024), (16 * HUGE, 8), (16 * HUGE - 1, 7),
                         (10**30 + 11, 5), (20, 100), (33, 50), (10**50 - 3, 10**12),
                          (10**13, 10**12 + 1)):
        for stage in range(4):
            yield Case(f"most({limit}, {ranks}, {stage})", "most", [limit, ranks, stage],
                       returns=Whole(count_numbers(limit, ranks, stage)))
    for args in ((-1, 2, 1), (-1, 2, 0), (100, 0, 3), (100, -1, 0), (100, 2, 4), (100, 2, -1),
                 (0, 0, 0), (0, 2, 4), (0, -1, 3), (3, 0, 1), (5, 2, -1), (100, 1, 4), (-1, 1, 0),
                 (-1, 1, 3), (-1, 2, 3), (100, 0, 0), (100, 0, 1), (100, 0, 2)):
        yield Case(f"most{args}", "most", list(args), raises=ValueError)
