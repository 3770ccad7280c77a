"""What solutions of assignment 4 are judged by. See `marking.cases`."""

import numpy as np
from marking.cases import Anything, Case, Near, compare, cpu, mx, near, numpy

FLAT = [np.zeros((1, 2)), np.zeros(1)]


def make_weights(rng, sizes):
    """Weights and biases [W, b, W, b, ...] of a network whose layers have these sizes."""
    return [rng.normal(size=s) for m, h in zip(sizes, sizes[1:]) for s in ((h, m), (h,))]


def find_gradients(weights, x, y):
    """Gradients [W, b, ...] of the sum of half the squared errors, by backpropagation."""
    layers, inputs = list(zip(weights[::2], weights[1::2])), [x]
    for w, b in layers[:-1]:
        inputs.append(np.tanh(inputs[-1] @ w.T + b))
    w, b = layers[-1]
    slope, gradients = inputs[-1] @ w.T + b - y[:, None], []
    for (w, _), given in zip(layers[::-1], inputs[::-1]):
        gradients = [slope.T @ given, slope.sum(axis=0), *gradients]
        slope = slope @ w * (1 - given**2)
    return gradients


def measure(arrays):
    return float(np.linalg.norm(np.concatenate([a.ravel() for a in arrays])))


def gradients(weights, batches, there, careful=True):
    """A case of batch_by_batch. careful: whether the network is looked at after the calls."""
    due = []
    for x, y in batches:
        shards = zip(np.array_split(x, len(there)), np.array_split(y, len(there)))
        by_device = [find_gradients(weights, a, b) for a, b in shards]
        due.append([[near(g, on=d) for g, d in zip(replicas, there)]
                    for replicas in zip(*by_device)])
    kept = [[mx(w, on=d) for d in there] for w in weights]

    def check(found):
        compare(found, (Anything(),) * 3)
        returned, left, weights_left = found
        names = "parameter", "gradient"
        if careful:
            compare(weights_left, kept, "the network's weights after the call",
                    ("parameter", "replica"))
        compare(returned, due, "what was returned, seen after the last call,"
                if len(batches) > 1 else "", ("batch", *names))
        if careful:
            compare(left, due[-1], "the network's own gradients", names)

    lengths = [len(x) for x, _ in batches]
    few = " (fewer than devices)" if min(lengths) < len(there) else ""
    names_of = ", ".join(map(str, there)) if len(there) < 10 else f"{there[0]} to {there[-1]}"
    return Case(f"batches of {', '.join(map(str, lengths))} examples{few}, devices "
                f"{names_of}, layers of {[w.shape[1] for w in weights[::2]]} "
                "inputs", "batch_by_batch", give(weights, batches, there), returns=check)


def give(weights, batches, there):
    return [[numpy(w) for w in weights], [(mx(x), mx(y)) for x, y in batches], list(there)]


def make_batch(rng, n, inputs, off=0):
    return rng.normal(size=(n, inputs)), rng.normal(size=n) + off


def gradients_values():
    """Each device's gradients: values, order and devices"""
    three = np.array([[8.0, 0], [0, 16], [1, 1]]), -np.ones(3)
    yield gradients(FLAT, [three], [cpu(0), cpu(1)], careful=False)
    rng = np.random.default_rng(41)
    for n, sizes, numbers in ((4, (3, 1), [0]), (6, (2, 3, 1), [2, 0]), (8, (3, 4, 1), [1, 3, 2]),
                              (6, (2, 2, 3, 1), [5, 0, 2, 9]), (7, (4, 1), [4, 3, 2, 1, 0]),
                              (3, (1, 2, 1), [7, 1, 4]), (1, (2, 2, 1), [6]), (5, (1, 1), [3, 8]),
                              (13, (2, 3, 1), [8, 2, 0, 5, 11, 3, 1, 9, 4])):
        yield gradients(make_weights(rng, sizes), [make_batch(rng, n, sizes[0])],
                        [cpu(i) for i in numbers], careful=False)


def gradients_care():
    """Each device's gradients: several batches, devices without examples, devices named twice"""
    three = np.array([[8.0, 0], [0, 16], [1, 1]]), -np.ones(3)
    yield gradients(FLAT, [three, (three[0][2:], three[1][2:])], [cpu(0), cpu(1)])
    rng = np.random.default_rng(42)
    for lengths, sizes, numbers in (((4, 1), (3, 1), [2, 1]), ((5, 2, 3), (2, 3, 1), [3, 0, 1]),
                                    ((4, 1, 4), (3, 2, 2, 1), [4, 2, 7, 1]),
                                    ((1, 6, 2), (2, 3, 1), [0, 1, 2, 3]), ((2, 1), (2, 2, 1), [5]),
                                    ((3, 3), (2, 3, 1), [1, 0]), ((1,), (2, 3, 1), [3, 0, 2, 1]),
                                    ((2,), (2, 3, 1), [1, 5, 0]), ((49,), (1, 1), range(49)),
                                    ((18, 4), (2, 3, 2, 1), [9, 0, 4, 2, 8, 1, 6, 3, 5])):
        yield gradients(make_weights(rng, sizes), [make_batch(rng, n, sizes[0]) for n in lengths],
                        [cpu(i) for i in numbers])
    weights = make_weights(rng, (3, 1))
    for n, numbers in ((4, [0, 0]), (4, [1, 0, 1]), (5, [0, 1, 1]), (1, [2, 0, 0]),
                       (6, [3, 1, 3, 2]),
                       (12, [4, 8, 0, 1, 2, 3, 5, 6, 4])):
        there = [cpu(i) for i in numbers]
        yield Case(f"devices {', '.join(map(str, there))}, one named twice", "batch_by_batch",
                   give(weights, [make_batch(rng, n, 3)], there), raises=ValueError)


def norm(values, n, numbers, what=""):
    """A case of mean_norm. values: an array [device, ...] for each parameter."""
    exact = [v.astype("float64").sum(axis=0) for v in values]
    return Case(f"{len(values)} parameters on devices {numbers}, n={n}{what}", "mean_norm",
                [[[mx(g, on=cpu(i)) for g, i in zip(v, numbers)] for v in values], n],
                returns=Near(measure(exact) / n, 1e-12))


def norm_values():
    """The norm of the batch's gradient: values"""
    yield norm([np.array([[[12, -16]], [[-4, 32]]], "float32"), np.ones((2, 1), "float32")],
               2, [0, 1], " (it is 9)")
    rng = np.random.default_rng(43)
    for n, shapes, numbers in ((3, [(4,)], [0]), (4, [(2, 3), (2,)], [2, 1]),
                               (7, [(5, 2), (5,), (1, 5), (1,)], [3, 0, 5]),
                               (10, [(3, 2, 2, 2), (3,), (1, 12)], [4, 3, 2, 1]),
                               (32, [(6, 1), (6,)], [0, 1, 2, 3, 4]), (1, [(1, 2), (1,)], [7, 2]),
                               (11, [(4, 3), (4,)], [8, 2, 0, 5, 11, 3, 1, 9, 4])):
        far = np.arange(1, len(numbers) + 1) / 2   # devices differ, each in its own way
        yield norm([rng.normal(size=(len(numbers), *s)) + far.reshape(-1, *[1] * len(s))
                    for s in shapes], n, numbers)
    yield norm([np.array([[3.0, 4], [-3, -4]])], 2, [0, 1], ", opposite gradients")
    yield norm([np.zeros((3, 2, 2)), np.zeros((3, 2))], 4, [0, 1, 2], ", zeros")
    one = rng.normal(size=(2, 3))
    yield norm([one, one, 2 * one], 3, [1, 0], ", equal and of one shape")
    yield norm([one, 3 * one, -one], 3, [1, 0], ", other ones of these shapes")
    yield norm([np.repeat(one[:1], 3, axis=0)], 3, [0, 1, 2], ", the same on every device")
    yield norm([np.stack([one[0], 0 * one[0]])], 3, [0, 1], ", zeros on device 1")


def norm_care():
    """The norm of the batch's gradient: other types of numbers, large and small ones"""
    yield norm([np.array([[3e25]], "float32"), np.array([[4e25]], "float32")], 1, [0],
               ", float32 of 1e25, whose squares need float64")
    rng = np.random.default_rng(44)
    for k, scale in ((1, 1), (2, 1e25), (3, 1e-25), (4, 1), (9, 1e-30)):
        values = [(scale * rng.normal(size=(k, *s))).astype("float32") for s in ((3, 2), (3,))]
        yield norm(values, 8, list(range(k))[::-1], f", float32 around {scale:g}")
        yield norm([v.astype("float64") for v in values], 8, list(range(k)),
                   f", float64 around {scale:g}")
    yield norm([np.array([[3e38], [3e38], [-2e38]], "float32")], 2, [0, 1, 2],
               ", float32 whose sum needs float64")
    halves = (300 * rng.normal(size=(2, 4, 3))).astype("float16")
    yield norm([halves], 4, [1, 0], ", float16")
    yield norm([halves, rng.normal(size=(2, 4)).astype("float32"), rng.normal(size=(2, 3))],
               5, [0, 1], ", of three types")


def steps(weights, batches, numbers, theta, what="", norms=True):
    """A case of train. theta: a limit, or one for each batch. norms: whether it is looked at what
    the calls return."""
    there, speeds = [cpu(i) for i in numbers], [0.0 for _ in weights]
    given = [[numpy(w) for w in weights], [(numpy(x), numpy(y)) for x, y in batches], there, theta]
    limits = theta if isinstance(theta, list) else [theta] * len(batches)
    shown = ", ".join(f"{one:.6g}" for one in (limits if isinstance(theta, list) else [theta]))
    due, after = [], []
    for (x, y), limit in zip(batches, limits):
        mean = [g / len(x) for g in find_gradients(weights, x, y)]
        length = measure(mean)
        factor = limit / length if length > limit else 1
        speeds = [0.5 * v - 0.25 * factor * g for v, g in zip(speeds, mean)]
        weights = [w + v for w, v in zip(weights, speeds)]
        due.append(Near(length, 1e-12))
        after.append([[near(w, on=d) for d in there] for w in weights])

    def check(found):
        compare(found, ([Anything()] * len(due),) * 2)
        for t, (length, replicas) in enumerate(zip(*found)):
            compare(length, due[t] if norms else Anything(), f"the norm of step {t}")
            compare(replicas, after[t], f"the weights after step {t}", ("parameter", "replica"))

    return Case(f"batches of {', '.join(str(len(x)) for x, _ in batches)} examples, "
                f"devices {numbers}, theta={shown}{what}", "train", given, returns=check)


def step_values():
    """A clipped step: the norm, and the weights of all replicas"""
    nine = np.array([[8.0, 0], [0, 16]]), -np.ones(2)
    yield steps(FLAT, [nine], [0, 1], 4.5, " (the norm is 9)")
    rng = np.random.default_rng(45)
    for lengths, sizes, numbers in (((4, 8), (3, 1), [0]), ((8, 4, 8), (2, 3, 1), [2, 0]),
                                    ((8, 4, 16), (3, 4, 1), [1, 3, 2]),
                                    ((4, 8), (2, 2, 3, 1), [5, 0, 2, 9]),
                                    ((8, 16), (4, 1), [4, 3, 2, 1, 0]), ((2, 2), (1, 2, 1), [3, 1]),
                                    ((16, 16, 16, 16), (2, 3, 1), [8, 2, 0, 5, 11, 3, 1, 9, 4])):
        batches = [make_batch(rng, n, sizes[0], 3) for n in lengths]
        yield steps(make_weights(rng, sizes), batches, numbers, 0.2 + 0.05 * len(numbers))
    x, y = make_batch(rng, 8, 2)
    yield steps(FLAT, [nine], [0, 1], 0.0, ", a limit of 0")
    yield steps(FLAT, [nine, nine], [0, 1], [4.5, 0.0], " in turn")
    for idle, targets in ((1, [-1.0, 0]), (0, [0, -1.0])):
        yield steps(FLAT, [(nine[0], np.array(targets)), nine], [0, 1], 2.0,
                    f", device {idle} has nothing to learn at first")
    for k in (1, 3):   # norms well below 1, clipped all the same
        yield steps(FLAT, [(x / 100, y / 100), (x / 50, y / 100)], list(range(k)), 1e-4)


def step_care():
    """A clipped step: norms below the limit, and norms of zero"""
    nine = np.array([[8.0, 0], [0, 16]]), -np.ones(2)
    yield steps(FLAT, [nine], [0, 1], 10, ", below the limit")
    yield steps(FLAT, [nine], [0, 1], 9.0, ", just the limit")
    rng = np.random.default_rng(46)
    for n, sizes, numbers in ((4, (3, 1), [0]), (8, (2, 3, 1), [3, 1]), (8, (3, 1), [0, 1, 2]),
                              (16, (2, 3, 2, 1), [2, 7, 0, 1]),
                              (16, (2, 3, 1), [8, 2, 0, 5, 11, 3, 1, 9, 4])):
        weights, batch = make_weights(rng, sizes), make_batch(rng, n, sizes[0])
        length = measure(find_gradients(weights, *batch)) / n
        for room in (1.1, 50, 1e6):
            yield steps(weights, [batch], numbers, room * length, ", below the limit")
        yield steps(weights, [batch, make_batch(rng, n, sizes[0]), batch], numbers, 1e3,
                    ", below the limit")
        # Nothing left to learn: the network says 0, and 0 is right. Then it isn't.
        still = [rng.normal(size=(2, 3)), rng.normal(size=2), np.zeros((1, 2)), np.zeros(1)]
        x, y = make_batch(rng, n, 3)
        yield steps(still, [(x, 0 * y), (x, 0 * y)], numbers, 0.5, ", gradients of zeros")
        yield steps(still, [(x, 0 * y), (x, y)], numbers, 1e3, ", gradients of zeros first")
    # The network is at -x - 2y - 0.25 after the first step, unclipped, and goes on by its momentum
    # alone: from there all is learnt, or what two devices find cancels.
    learnt, opposite = np.array([[1.0, 0], [0, 1]]), np.array([[1.0, 0], [1, 0]])
    for x, y, what in ((learnt, [-1.25, -2.25], "gradients of zeros"),
                       (opposite, [-0.25, -2.25], "opposite gradients")):
        for numbers in ([0], [0, 1], [2, 0]):
            yield steps(FLAT, [nine, (x, np.array(y)), nine], numbers, 1e3, f", {what} second")
    # Norms of 8, 1 and 64. One device and one entry that isn't 0, as only the limit is tested here.
    one, two = np.array([[8.0, 0], [-8, 0]]), np.array([[0.0, 1], [0, -1]])
    signs = np.array([-1.0, 1])
    yield steps(FLAT, [(one, signs), (two, signs), (one, 4 * signs)], [0], 4.0,
                ", above the limit, below and above", norms=False)
    # 8, 64 and 8 again.
    yield steps(FLAT, [(one, signs), (one, 16 * signs), (one, 45 * signs)], [0], [4.0, 16.0, 1e3],
                " in turn", norms=False)
