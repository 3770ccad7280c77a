"""What solutions of assignment 7 are judged by. See `marking.cases`.

What is expected is what one process finds that has all ranks' examples: PyTorch differentiates, and
the means and updates are written out here.
"""

import numpy as np
import torch
from marking.cases import (Anything, Case, Near, Ranks, Wrong, compare, numpy, read_number)

CLOSE = 1e-12


def make_layers(rng, widths):
    """[[W, b], ...] of layers from widths[i] inputs to widths[i + 1] outputs."""
    return [[rng.normal(size=(a, b)) / np.sqrt(a), rng.normal(size=b)]
            for a, b in zip(widths, widths[1:])]


def make_part(rng, layers, route, n):
    """One rank's (x, y, route) of a step: n examples."""
    return [rng.normal(size=(n, len(layers[route[0]][0]))),
            rng.normal(size=(n, len(layers[route[-1]][1]))), list(route)]


def differentiate(arrays, trained, shift, x, y, route, total="mean"):
    """(loss, a gradient or None for each array) of one rank's examples."""
    tensors = [torch.tensor(a, requires_grad=one) for a, one in zip(arrays, trained)]
    h = torch.tensor(x + shift)
    for i in route:
        h = torch.tanh(h @ tensors[2 * i] + tensors[2 * i + 1])
    loss = getattr((h - torch.tensor(y)) ** 2, total)()
    found = iter(torch.autograd.grad(loss, [t for t in tensors if t.requires_grad],
                                     allow_unused=True))
    gradients = [next(found) if one else None for one in trained]
    return loss.item(), [None if g is None else g.numpy() for g in gradients]


def add(before, gradient):
    """What a backward pass makes of the gradient that was there."""
    return (gradient if before is None else before if gradient is None else before + gradient)


def mean(gradients):
    """Over ranks, of which None counts as zeros; None where all are."""
    there = [g for g in gradients if g is not None]
    return sum(there) / len(gradients) if there else None


def update(arrays, gradients, speeds, rate, decay=0.0, momentum=0.0):
    """Arrays and speeds after a step of gradient descent; None is left alone."""
    speeds = [v if g is None else momentum * v + g + decay * a
              for a, g, v in zip(arrays, gradients, speeds)]
    return [a if g is None else a - rate * v
            for a, g, v in zip(arrays, gradients, speeds)], speeds


def train(layers, shift, frozen, ranks, rate, keep=(), **options):
    """(mean gradients of each step, arrays at the end). ranks: [rank][step] -> (x, y, route).
    keep: numbers of steps before which gradients are not cleared."""
    arrays = [array for layer in layers for array in layer]
    trained = [i // 2 not in frozen for i in range(len(arrays))]
    history, speeds = [], [0.0] * len(arrays)
    for step, parts in enumerate(zip(*ranks)):
        found = [differentiate(arrays, trained, shift, *part)[1] for part in parts]
        if step in keep:
            found = [[add(*pair) for pair in zip(history[-1], one)] for one in found]
        history.append([mean(each) for each in zip(*found)])
        arrays, speeds = update(arrays, history[-1], speeds, rate, **options)
    return history, arrays


def send(values):
    """Arrays and lists of them as what can cross."""
    if isinstance(values, list):
        return [send(one) for one in values]
    return numpy(values) if isinstance(values, np.ndarray) else values


def close(values):
    """The same as what is expected."""
    if isinstance(values, list):
        return [close(one) for one in values]
    return None if values is None else Near(numpy(values), CLOSE)


def compare_parts(*parts):
    """A check of a tuple; parts: (what, expected, names) of its entries."""
    def check(found):
        compare(found, (Anything(),) * len(parts), "what comes back")
        for one, (what, expected, *names) in zip(found, parts):
            compare(one, expected, what, names)
    return check


def naive(what, layers, shift, ranks, frozen=(), rate=0.3, decay=0.0, others=None, keep=()):
    """A call of NaiveDDP. ranks: [rank][step] -> (x, y, route). others: (layers, shift) with
    which ranks 1, 2, ... come. keep: as above."""
    history, arrays = train(layers, shift, frozen, ranks, rate, keep, decay=decay)
    check = compare_parts(("the gradients", close(history), "step", "parameter"),
                          ("the parameters at the end", close(arrays), "parameter"),
                          ("the buffer", numpy(shift)))
    begins = [(layers, shift), *(others or [(layers, shift)] * (len(ranks) - 1))]
    return Ranks(what, [
        Case(what, "train_naive",
             [send(mine), numpy(own), list(frozen), send(steps), rate, decay, list(keep)],
             returns=check)
        for (mine, own), steps in zip(begins, ranks)])


def naive_values():
    """One gradient at a time: the mean on all ranks"""
    rng = np.random.default_rng(71)
    zeros, x = [[np.zeros((1, 1)), np.zeros(1)]], np.ones((1, 1))
    yield naive("two ranks, the example above", zeros, np.zeros(1),
                [[[x, -x, [0]]], [[3 * x, -2 * x, [0]]]], rate=0.5)
    for world in (2, 3, 4, 1):
        layers = make_layers(rng, [3, 4, 2])
        yield naive(f"{world} ranks, three steps", layers, rng.normal(size=3),
                    [[make_part(rng, layers, [0, 1], n) for n in (4, 2, 5)]
                     for _ in range(world)])
    layers = make_layers(rng, [3, 3, 3, 2])
    yield naive("two ranks with different numbers of examples, a layer used twice", layers,
                rng.normal(size=3),
                [[make_part(rng, layers, [0, 1, 1, 2], n) for n in sizes]
                 for sizes in ((1, 6), (5, 2))], decay=0.1)


def naive_start():
    """One gradient at a time: all ranks begin with rank 0's parameters and buffers"""
    rng = np.random.default_rng(72)
    for world, frozen in ((3, [0]), (2, []), (4, [1]), (2, [0, 1])):
        layers, *others = [make_layers(rng, [2, 3, 2]) for _ in range(world)]
        shift, *shifts = rng.normal(size=(world, 2))
        yield naive(f"{world} ranks that begin apart" + f", layer {frozen} is frozen" * bool(frozen),
                    layers, shift, [[]] * world, frozen, others=list(zip(others, shifts)))


def naive_missing():
    """One gradient at a time: parameters without a gradient"""
    rng = np.random.default_rng(73)
    layers = make_layers(rng, [2, 2, 2, 2, 2])

    def steps(*routes):
        return [make_part(rng, layers, route, 3) for route in routes]

    def case(what, ranks, frozen=(), keep=()):
        return naive(what, layers, rng.normal(size=2), ranks, frozen, decay=0.1, keep=keep)

    yield case("each of two ranks uses another layer", [steps([0]), steps([1])])
    yield case("two ranks, a layer that nobody uses", [steps([0, 1, 3])] * 2)
    yield case("two ranks, a layer that only rank 0 uses", [steps([0, 1]), steps([0])])
    yield case("three ranks, a layer that only rank 2 uses",
               [steps([0]), steps([0]), steps([0, 1])])
    yield case("two ranks, which layers are used changes from step to step",
               [steps([0], [1, 2], [0], [3]), steps([1], [1, 2], [2], [0])])
    yield case("four ranks, some layers are frozen",
               [steps([0, 1], [2]), steps([0, 1], [1, 2]), steps([2, 3], [0, 3]),
                steps([1, 0], [2, 3])], frozen=[1, 3])
    yield case("two ranks, gradients are not cleared before the second step and the third",
               [steps([0, 1], [2], [3]), steps([0], [0], [2])], keep=[1, 2])
    zeros, x = [[np.zeros((1, 1)), np.zeros(1)]] * 3, np.ones((1, 1))
    for what, targets, routes in (
            ("of zeros", (0, 0), ([0], [0])), ("that cancel each other", (1, -1), ([0], [0])),
            ("of zeros, on each rank for another layer", (0, 0), ([0], [1]))):
        # Layers of zeros: for the target y the bias's gradient is -2y, the weight's -2xy.
        yield naive(f"two ranks, gradients {what}, and a layer that nobody uses", zeros, np.zeros(1),
                    [[[x, y * x, route]] for y, route in zip(targets, routes)], decay=0.1)


def fill(layers, frozen, most):
    """[[(layer, numbers), ...], ...]: what is in each bucket, by the rules of exercise 2."""
    pieces = [(i, array.size) for i, layer in enumerate(layers) for array in layer
              if i not in frozen]
    buckets = []
    for piece in reversed(pieces):
        if not buckets or 8 * (count(buckets[-1]) + piece[1]) > most:
            buckets.append([])
        buckets[-1].append(piece)
    return buckets


def count(bucket):
    return sum(numbers for _, numbers in bucket)


def list_stations(buckets, frozen, route):
    """[(where a backward pass is, how many buckets have been sent by then), ...]."""
    stations = []
    for place in reversed(range(len(route))):
        # A layer's gradients are there when the pass is through with the first use of the layer.
        late = set(route[:place + 1])
        if late - set(frozen):   # else the pass doesn't come here
            sent = next((i for i, bucket in enumerate(buckets)
                         if late & {layer for layer, _ in bucket}), len(buckets))
            stations.append((f"the backward pass came to layer {route[place]}", sent))
    return [*stations, ("the backward pass ended", len(buckets))]


def bucketed(what, layers, bucket_bytes, ranks, frozen=(), sent=True, values=True):
    """A call of BucketedDDP. ranks: as above. sent, values: what is looked at."""
    shift = np.zeros(len(layers[0][0]))
    history, arrays = train(layers, shift, frozen, ranks, 0.2, momentum=0.5)
    due = [("the gradients", close(history), "step", "parameter"),
           ("the parameters at the end", close(arrays), "parameter")]
    if not values:
        due = [(name, Anything()) for name, *_ in due]
    buckets, counts = fill(layers, frozen, bucket_bytes), [[] for _ in ranks]
    sizes, steps = [count(bucket) for bucket in buckets], len(ranks[0])
    call = Ranks(what, [])
    call.cases = [
        Case(what, "train_bucketed",
             [send(layers), list(frozen), bucket_bytes, send(steps), 0.2, note(call, rank, counts)],
             returns=compare_parts(*due))
        for rank, steps in enumerate(ranks)]

    def look(record):
        if any(one.kind != "all_reduce" for one in record):
            raise Wrong(f"a {next(one.kind for one in record if one.kind != 'all_reduce')} "
                        "was sent; only buckets are to be")
        found = [one.numbers for one in record]
        if found != sizes * steps:
            raise Wrong(f"the messages of {steps} step{'s' * (steps > 1)} have {found} numbers, "
                        f"not {sizes * steps}")
        for rank, parts in enumerate(ranks):
            due = [(step, when, len(buckets) * step + sent) for step, (*_, route) in enumerate(parts)
                   for when, sent in list_stations(buckets, frozen, route)]
            if len(counts[rank]) != len(due):
                raise Wrong(f"rank {rank}: a backward pass came to {len(counts[rank])} layers and "
                            f"ends, not {len(due)}")
            for (step, when, sent), found in zip(due, counts[rank]):
                if found != sent:
                    raise Wrong(f"rank {rank}, step {step + 1}: {found - len(buckets) * step} of "
                                f"{len(buckets)} buckets were sent when {when}, not "
                                f"{sent - len(buckets) * step}")

    call.messages = look if sent else None
    return call


def note(call, rank, counts):
    """The function `note` of train_bucketed: it notes how much the rank has sent by then."""
    def noted(word):
        counts[rank].append(len(call.exchange.record[rank]))
    return noted


def bucketed_values():
    """Buckets: the mean on all ranks"""
    rng = np.random.default_rng(74)
    for world, most in ((2, 100), (3, 1), (4, 10_000), (1, 64), (2, 130)):
        layers = make_layers(rng, [3, 4, 2, 3])
        yield bucketed(f"{world} ranks, buckets of {most} bytes", layers, most,
                       [[make_part(rng, layers, [0, 1, 2], n) for n in (3, 1, 4)]
                        for _ in range(world)], sent=False)


def bucketed_messages():
    """Buckets: which messages are sent, and when"""
    rng = np.random.default_rng(75)
    small = make_layers(rng, [2, 2, 2])
    for most in (48, 47, 64, 1, 1000):
        yield bucketed(f"the network above, buckets of {most} bytes", small, most,
                       [[make_part(rng, small, [0, 1], 3)] * 2] * 2, values=False)
    for world, most in ((2, 120), (3, 119), (4, 8 * 17), (1, 90), (2, 8 * 6), (2, 0.5)):
        layers = make_layers(rng, [3, 4, 2, 5, 1])
        yield bucketed(f"{world} ranks, four layers, buckets of {most} bytes", layers, most,
                       [[make_part(rng, layers, [0, 1, 2, 3], 2)] * 3] * world, values=False)
    zeros, x = [[np.zeros((2, 2)), np.zeros(2)]] * 2, np.ones((1, 2))
    yield bucketed("layers of zeros, and targets of 0 in the first step: gradients of zeros", zeros,
                   16, [[[x, y * x, [0, 1]] for y in (0, 1)]] * 2, values=False)


def bucketed_care():
    """Buckets: another order of layers, frozen ones, sizes that can't be"""
    rng = np.random.default_rng(76)
    layers = make_layers(rng, [2, 2, 2, 2])
    for most in (48, 1, 1000, 32):
        for route in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
            yield bucketed(f"layers in the order {route}, buckets of {most} bytes", layers, most,
                           [[make_part(rng, layers, route, 3) for _ in range(2)]] * 2)
    for most in (48, 1):
        yield bucketed(f"another order of layers in each step, buckets of {most} bytes", layers,
                       most, [[make_part(rng, layers, route, 3)
                               for route in ([2, 1, 0], [1, 0, 2], [0, 1, 2])]] * 2)
    yield bucketed("ranks with layers in different orders", layers, 48,
                   [[make_part(rng, layers, route, 3) for _ in range(2)]
                    for route in ([0, 1, 2], [2, 1, 0], [1, 0, 2])])
    yield bucketed("a layer that is used twice", layers, 48,
                   [[make_part(rng, layers, [0, 1, 1, 2], 3) for _ in range(3)]] * 2)
    for frozen, most in (([1], 48), ([0], 48), ([0, 2], 48), ([1], 96)):
        yield bucketed(f"layers {frozen} are frozen, buckets of {most} bytes", layers, most,
                       [[make_part(rng, layers, [0, 1, 2], 3) for _ in range(2)]
                        for _ in range(2)], frozen)
    for most in (0, -1, -0.5):
        call = bucketed(f"bucket_bytes={most}", layers, 1, [[], []], sent=False)
        for case in call.cases:
            case.args[2], case.raises = most, ValueError
        yield call


def accumulated(what, layers, ranks, frozen=(), sent=False, rate=0.2):
    """A call of train_step. ranks: [rank][step] -> list of (x, y)."""
    arrays = [array for layer in layers for array in layer]
    trained = [i // 2 not in frozen for i in range(len(arrays))]
    losses, speeds, steps = [], [0.0] * len(arrays), len(ranks[0])
    for step in range(steps):
        found = [differentiate(arrays, trained, 0, x, y, range(len(layers)), "sum")
                 for rank in ranks for x, y in rank[step]]
        examples = sum(len(x) for rank in ranks for x, _ in rank[step])
        losses.append(sum(loss for loss, _ in found) / examples)
        means = [None if not one else sum(g[i] for _, g in found) / examples
                 for i, one in enumerate(trained)]
        arrays, speeds = update(arrays, means, speeds, rate, momentum=0.5)
    numbers = [array.size for array, one in zip(arrays, trained) if one]

    def check_losses(found):
        compare(found, [Anything()] * steps, "the list of losses")
        for step, (one, due) in enumerate(zip(found, losses)):
            if type(one) is not float:
                raise Wrong(f"the loss of step {step} is no float")
            if not abs(read_number(one) - due) <= 1e-6 * due:   # float32 will do
                raise Wrong(f"the loss of step {step} is {one:.6g}, which is not right")

    def check(found):
        compare(found, (Anything(), Anything()), "what comes back")
        check_losses(found[0])
        compare(found[1], close(arrays), "the parameters at the end", ("parameter",))

    def look(record):
        count, total = len(record), sum(one.numbers for one in record)
        if count > steps * (len(numbers) + 1):
            raise Wrong(f"{count} messages in {steps} steps, with {len(numbers)} gradients each")
        if total > steps * (sum(numbers) + 2):
            raise Wrong(f"{total} numbers were sent in {steps} steps; the gradients have "
                        f"{sum(numbers)}")
    return Ranks(what, [Case(what, "accumulate", [send(layers), list(frozen), send(steps), rate],
                             returns=check)
                        for steps in ranks], look if sent else None)


def make_pieces(rng, layers, sizes):
    return [[rng.normal(size=(n, len(layers[0][0]))), rng.normal(size=(n, len(layers[-1][1])))]
            for n in sizes]


def accumulated_values():
    """Accumulation: the step and the loss of one large batch"""
    rng = np.random.default_rng(77)
    for what, sizes in (
            ("two ranks, pieces of one length", [[[3, 3], [3, 3]], [[3, 3], [3, 3]]]),
            ("two ranks, pieces of different lengths", [[[1, 4], [2, 7]], [[5, 2], [1, 1]]]),
            ("three ranks with different numbers of pieces",
             [[[2], [3, 1, 1]], [[1, 1, 1], [2]], [[4, 2], [1, 5]]]),
            ("two ranks, of which one has nothing", [[[2, 3], []], [[], [4]]]),
            ("four ranks, some with nothing", [[[], [1]], [[3, 1], []], [[], [2]], [[], []]]),
            ("one rank", [[[2, 1], [3]]])):
        layers = make_layers(rng, [3, 4, 2])
        yield accumulated(what, layers, [[make_pieces(rng, layers, step) for step in steps]
                                         for steps in sizes])
    layers = [[np.tile([1.0, -1.0], (3, 1)), np.zeros(2)]]
    ranks = [[make_pieces(rng, layers, [2]) for _ in range(3)] for _ in range(2)]
    for what, target in (("gradient is", 0.5), ("gradient and the loss are", 1)):
        for steps in ranks:
            # So large that tanh is 1 or -1 in float64, and its slope 0: only the momentum moves.
            steps[1] = [[np.full((2, 3), 1e6), np.tile([target, -target], (2, 1))]]
        yield accumulated(f"two ranks, in the second step the {what} 0", layers, ranks)


def accumulated_messages():
    """Accumulation: each gradient is sent once"""
    rng = np.random.default_rng(78)
    for what, sizes, frozen, layers in (
            ("two ranks, five pieces", [[[1] * 5] * 2] * 2, [], [3, 2]),
            ("two ranks with different numbers of pieces", [[[1, 2]], [[3, 1, 1, 1]]], [],
             [3, 1, 2]),
            ("three ranks, a second layer that is frozen",
             [[[2, 2]] * 3, [[1]] * 3, [[3, 1]] * 3], [1], [2, 2, 2])):
        layers = make_layers(rng, layers)
        yield accumulated(what, layers, [[make_pieces(rng, layers, step) for step in steps]
                                         for steps in sizes], frozen, sent=True)
