"""What solutions of assignment 3 are judged by. See `marking.cases`."""

import dataclasses

import numpy as np
from marking.cases import (
    Anything, Array, Case, Near, Wrong, compare, cpu, mx, near, numpy, read_number)

BIG = 2**24 + 1   # float32 can't hold it
MIXED = [5, 2, 11, 0, 7, 3, 8, 1, 13]


def cross_entropy(z, y):
    """The losses [n] of float64 scores, and the gradient of their sum."""
    logs = np.logaddexp.reduce(z, axis=1)
    slope = np.exp(z - logs[:, None])
    slope[np.arange(len(y)), y] -= 1
    return logs - z[np.arange(len(y)), y], slope


def loss_values():
    """The loss: values, type of number and device"""
    equal = np.array([[0, 0, 0, 0], [np.log(3), 0, 0, 0]])
    yield Case("scores 0, 0, 0, 0 and log 3, 0, 0, 0", "cross_entropy",
               [mx(equal), mx(np.array([2, 0], "float32"))], near(np.log([4, 2])))
    rng = np.random.default_rng(1)
    for n, classes, kind, number, labels in (
            (5, 3, "float64", 0, "int32"), (1, 2, "float64", 1, "int32"),
            (4, 11, "float64", 3, "int32"), (7, 4, "float32", 2, "int32"),
            (6, 5, "float64", 0, "float32"), (6, 5, "float32", 9, "float64"),
            (3, 300, "float64", 4, "int64"), (9, 9, "float64", 0, "uint8"),
            (4, 1, "float64", 0, "int32"), (1, 1, "float32", 1, "float32")):
        z, y = rng.normal(size=(n, classes)).astype(kind), rng.integers(0, classes, n)
        due = cross_entropy(z.astype("float64"), y)[0].astype(kind)
        yield Case(f"{n} examples, {classes} classes, {kind}, labels in {labels}, cpu({number})",
                   "cross_entropy", [mx(z, cpu(number)), mx(y, cpu(number), labels)],
                   near(due, 1e-12 if kind == "float64" else 1e-5, cpu(number), scale=1))
    z, y = rng.normal(size=(2, 300)), np.array([299, 256])
    yield Case("2 examples, 300 classes, labels 299 and 256", "cross_entropy", [mx(z), mx(y)],
               near(cross_entropy(z, y)[0], 1e-12, scale=1))


def slope(what, z, y, kind="float64", weights=None):
    """A case of the loss and its gradient."""
    z = np.array(z, kind)
    within, scale = 1e-12 if kind == "float64" else 1e-6, max(1, np.abs(z).max())
    losses, slopes = cross_entropy(z.astype("float64"), y)
    if weights is not None:
        slopes = slopes * weights[:, None]
    due = [near(a.astype(kind), within, scale=scale) for a in (losses, slopes)]

    def check(found):
        compare(found, (Anything(), Anything()))
        for one, expected, name in zip(found, due, ("the array of losses", "the gradient")):
            if one is None:
                raise Wrong("autograd finds no way from the loss back to the scores")
            if isinstance(one, Array) and not np.isfinite(one.values).all():
                raise Wrong(f"{name} holds a number that is infinite, or no number at all")
            compare(one, expected, name)

    labels = mx(y, dtype="int32" if kind == "float64" else kind)
    given = [mx(z, gradient=True), labels] + ([] if weights is None else [mx(weights)])
    return Case(what, "loss_and_gradient", given, check)


def loss_gradient():
    """The loss: its gradient, and scores of any size"""
    yield slope("all scores 0", np.zeros((2, 2)), [0, 1], "float32")
    yield slope("scores 1000 and 0", [[1000, 0], [1000, 0]], [0, 1], "float32")
    rng = np.random.default_rng(2)
    for n, classes, scale, middle in (
            (6, 3, 1, 0), (3, 5, 2, 0), (4, 3, 900, 0), (5, 4, 3, -3000), (4, 7, 1, 5000),
            (1, 12, 1, 0), (3, 1, 1, 0), (40, 2, 500, 0)):
        z = scale * rng.normal(size=(n, classes)) + middle * np.linspace(-1, 1, n)[:, None]
        size = "large scores" if np.abs(z).max() > 100 else "scores"
        yield slope(f"{n} examples, {classes} classes, {size}", z, rng.integers(0, classes, n))
    for one in (0.0, -1e4, 1e4):
        yield slope(f"all scores {one:g}", np.full((3, 4), one), [3, 0, 1])
    yield slope("all scores negative and large", -1e5 * (1 + rng.random((4, 3))), [0, 1, 2, 1])
    yield slope("scores of a million", [[1e6, 0, -1e6], [-1e6, 1e6, 0]], [0, 2])
    yield slope("two largest scores", [[800, 800, 3], [-5, 2, 2]], [2, 1])
    yield slope("scores of 1e300", [[1e300, 0, -1e300], [-1e300, 1e300, 0]], [0, 2])
    for weights in (np.full(3, 1 / 3), np.array([2.0, 0, -1])):
        yield slope(f"3 examples, 4 classes, weights {', '.join(f'{w:.3g}' for w in weights)}",
                    rng.normal(size=(3, 4)), [3, 0, 1], weights=weights)


def copies(values, there, home=0):
    """A case of make_replicas on parameters with these values."""
    return Case(f"{len(values)} parameters on {cpu(home)}, devices {', '.join(map(str, there))}",
                "make_replicas", [[mx(v, cpu(home)) for v in values], list(there)],
                [[mx(v, d) for v in values] for d in there], names=("replica", "parameter"))


def slopes(values, there, own=False):
    """A case of the replicas' gradients. own: the parameters have gradients, too."""
    return Case(f"{len(values)} parameters{' with gradients of their own' * own}, devices "
                f"{', '.join(map(str, there))}, after the second backward pass",
                "replica_gradients", [[mx(v, gradient=own) for v in values], list(there)],
                [[near((r + 1) * v, 1e-6, d) for v in values] for r, d in enumerate(there)],
                names=("replica", "the gradient of parameter"))


def kinds(values, there):
    """A case of their types. Whether there are gradients, and which, others look at."""
    one = slopes(values, there)

    def check(found):
        compare(found, [[Anything()] * len(values)] * len(there), "", one.names)
        for r, (replica, due) in enumerate(zip(found, one.returns)):
            for i, (g, v) in enumerate(zip(replica, due)):
                compare(g, Anything() if g is None else v._replace(within=np.inf),
                        f"the gradient of parameter {i} of replica {r}")

    return dataclasses.replace(one, returns=check)


def replicas_values():
    """Replicas: values, order, devices and gradients"""
    rng = np.random.default_rng(3)
    tries = [([cpu(0), cpu(1)], [np.array([[1, 2], [3, 4]], "float32"),
                                 np.array([5, 6], "float32")])]
    for numbers, shapes in (([1], [(3,)]), ([1, 2], [(2, 3), (3,), (3, 1)]), ([0], [(2, 2), (1,)]),
                            ([1, 2, 3], [(4, 2), (2,)]), ([1, 2, 3, 0], [(1, 2)] * 5),
                            ([6, 2], [(2, 3, 1, 2), (2,)]), (MIXED, [(2, 3), (3,)])):
        tries.append(([cpu(i) for i in numbers],
                      [rng.normal(size=shape).astype("float32") for shape in shapes]))
    for there, values in tries:
        yield copies(values, there)
        yield slopes(values, there)
    yield slopes([v.astype("float32") for v in rng.normal(size=(2, 3))], [cpu(1), cpu(0)], True)


def replicas_care():
    """Replicas: memory of their own, types of numbers, one device twice"""
    rng = np.random.default_rng(4)
    for numbers, home in (([0], 0), ([0, 1], 0), ([2, 0, 1], 0), ([1, 2, 0, 3], 2), ([4], 4),
                          (MIXED, 3)):
        yield copies([rng.normal(size=shape) for shape in ((2, 3), (3,), (1,))],
                     [cpu(i) for i in numbers], home)
    yield copies([np.ones(2, "float32"), rng.normal(size=3)], [cpu(1), cpu(0)])
    yield kinds([np.ones(2, "float32"), rng.normal(size=3)], [cpu(1), cpu(0)])
    yield copies([np.ones((2, 2), "float16"), np.ones(2, "float16")], [cpu(0), cpu(2)])
    for numbers in ([0, 0], [1, 2, 1], [0, 1, 2, 2], [2, 0, 2, 1], [3, 5, 4, 1, 3], [*MIXED, 7]):
        yield Case(f"devices {', '.join(str(cpu(i)) for i in numbers)}", "make_replicas",
                   [[mx(np.ones(2))], [cpu(i) for i in numbers]], raises=ValueError)
    yield Case("no parameters, devices cpu(1), cpu(1)", "make_replicas", [[], [cpu(1), cpu(1)]],
               raises=ValueError)
    yield copies([np.zeros(2), np.zeros(3), np.zeros(2)], [cpu(0), cpu(1)])
    values, there = [rng.normal(size=2), rng.normal(size=2)], [cpu(0), cpu(1)]
    one, other = map(mx, values)
    yield Case("parameter 2 is parameter 0 once more, devices cpu(0), cpu(1)", "make_replicas",
               [[one, other, one], there],
               [[mx(values[i], d) for i in (0, 1, 0)] for d in there],
               names=("replica", "parameter"))
    models = [[rng.normal(size=shape) for shape in ((2, 3), (3,))] for _ in range(2)]
    yield Case("two models of 2 parameters, devices cpu(0), cpu(1)", "two_models",
               [*([mx(v) for v in model] for model in models), there],
               [[[mx(v, d) for v in model] for d in there] for model in models],
               names=("model", "replica", "parameter"))


def train_on_one(weights, x, y, lr):
    """(weights after a step of one device, mean loss before): the gradient worked out by hand."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    errors = hidden @ w2 + b2 - y
    back = errors @ w2.T * (1 - hidden**2)
    sums = x.T @ back, back.sum(0), hidden.T @ errors, errors.sum(0)
    return ([w - lr * s / len(x) for w, s in zip(weights, sums)],
            float((errors**2).sum() / 2 / len(x)))


def expect_replicas(before, after, there):
    """What checks that all replicas went from the weights `before` to those `after`."""
    old, new = (np.concatenate([w.ravel() for w in weights]) for weights in (before, after))
    largest = float(np.abs(new).max())

    def check(found, within=1e-12):
        compare(found, [[near(w, within, d, largest) for w in after] for d in there],
                "`replicas`", ("replica", "parameter"))

    @np.errstate(over="ignore")
    def explain(found):
        """In words, how replicas went another way. They are arrays of the right shapes."""
        now = [np.concatenate([p.values.ravel() for p in replica]) for replica in found]
        for r, w in enumerate(now):
            if not np.isfinite(w).all():
                return f"replica {r} holds a number that is infinite"
            if (w == old).all():
                return f"replica {r} has not changed"
        for r, w in enumerate(now):
            if np.abs(w - now[0]).max() > 1e-12 * largest:
                return f"replicas 0 and {r} have drifted apart"
        length = np.linalg.norm(now[0] - old) / np.linalg.norm(new - old)
        if abs(length - 1) > 0.005:
            return f"the way from the start is {length:.2f} times as long as that of one device"
        return (f"all replicas agree, but are {np.abs(now[0] - new).max() / largest:.0e} of the "
                "largest weight from those of one device")

    def check_and_explain(found):
        try:
            check(found)
        except Wrong:
            check(found, within=np.inf)   # another reason, where they can't be compared
            raise Wrong(explain(found)) from None

    return check_and_explain


def steps(what, numbers, cuts, sizes=(4, 6, 2), lr=0.3, seed=0, alone=False, twins=False,
          again=False):
    """A case of steps on devices of these numbers, on batches whose shards have the lengths in
    `cuts`. lr: a rate, or one for each step. alone: one call of train_step, for one batch. twins:
    each example is there twice. again: every batch is the first one."""
    rng, there = np.random.default_rng(seed), [cpu(i) for i in numbers]
    inputs, hidden, outputs = sizes
    weights = start = [rng.normal(size=shape) / 2
                       for shape in ((inputs, hidden), (hidden,), (hidden, outputs), (outputs,))]
    batches, means = [], []
    rates = lr if isinstance(lr, list) else [lr] * len(cuts)
    for cut, rate in zip(cuts, rates):
        if not (again and batches):
            x, y = rng.normal(size=(sum(cut), inputs)), rng.normal(size=(sum(cut), outputs))
        if twins:
            x, y = (np.repeat(a[: len(a) // 2], 2, axis=0) for a in (x, y))
        batches.append([[mx(part, d) for part, d in zip(np.split(a, np.cumsum(cut)[:-1]), there)]
                        for a in (x, y)])
        weights, mean = train_on_one(weights, x, y, rate)
        means.append(Near(mean, 1e-12, max(1, mean)))
    copies = [[mx(w, d, gradient=True) for w in start] for d in there]
    what = (f"{what}, k={len(there)}, {len(cuts)} step{'s' * (len(cuts) > 1)} with shards of "
            + ", then ".join("+".join(map(str, cut)) for cut in cuts[:3])
            + ", ..." * (len(cuts) > 3) + f", from start({seed}, {inputs}, {hidden}, {outputs})")
    changes = {"replicas": expect_replicas(start, weights, there)}
    if alone:
        return Case(what, "train_step", [*batches[0], copies, lr],
                    lambda found: compare(found, means[0], "the mean loss"), changes)
    return Case(what, "run_steps", [copies, batches, lr], means, changes,
                names=("the mean loss of step",))


def step_values():
    """The step: weights and loss, on even shards"""
    yield steps("even shards", [0], [(8,)])
    yield steps("even shards", [0, 1], [(4, 4)])
    for numbers, size, lr in (([0], 5, 0.1), ([3], 1, 1), ([1, 0], 3, 0.25), ([1, 2, 0], 2, 0.1),
                              ([6, 1, 4, 2], 1, 0.3), ([1, 2, 3, 4, 0], 4, 0.2), (MIXED, 2, 0.15)):
        k = len(numbers)
        yield steps("even shards", numbers, [(size,) * k], lr=lr, seed=k, alone=True)
        yield steps("even shards", numbers, [(size,) * k] * 3, lr=lr, seed=k)
    yield steps("even shards, the same batch each time, rates 0, 0.1, 0.3", [0, 1], [(2, 2)] * 3,
                lr=[0, 0.1, 0.3], again=True)


def step_care():
    """The step: uneven shards, and fewer shards than replicas"""
    what, sizes = "uneven shards", (3, 5, 1)
    for numbers, cuts in (([1, 0], [(3, 1), (1, 5), (2, 7)]),
                          ([2, 1, 0], [(5, 2, 1), (1, 1, 6), (2, 3, 2)]),
                          ([3, 2, 1, 0], [(2, 1, 1, 1), (4, 3, 2, 1)]),
                          (MIXED, [(1, 2, 3, 4, 5, 6, 7, 8, 9), (9, 1, 1, 4, 2, 1, 3, 1, 2)])):
        yield steps(what, numbers, cuts[:1], sizes, alone=True)
        yield steps(what, numbers, cuts, sizes)
    what = "fewer shards than replicas"
    for numbers, cuts in (([1, 0], [(3, 3), (2,), (1,), (4, 4)]),
                          ([3, 2, 1, 0], [(2, 2, 2, 2), (3, 3), (1,), (2, 2, 2)]),
                          ([4, 7, 2], [(1,), (2, 1, 3), (5, 2)]),
                          (MIXED, [(2,) * 9, (3,) * 4, (1, 2), (1,) * 9])):
        yield steps(what, numbers, cuts, sizes)
    yield steps(what, [5, 0, 3], [(4, 1)], alone=True)
    yield steps("each example twice", [0, 1], [(3, 1), (2, 4)], twins=True)
    yield steps("the same batch each time, rates 0, 0.2", [0, 1, 2], [(2, 1)] * 2, lr=[0, 0.2],
                again=True)


def fit_line(x, y, parts):
    """The sum of losses of each batch: a linear model takes a step with one after the other."""
    x = x.reshape(len(x), -1).astype("float64")
    weight, sums = np.ones(x.shape[1]), []
    for part in parts:
        errors = x[part] @ weight - y[part]
        weight = weight - 0.1 / len(part) * (errors @ x[part])
        sums.append(float((errors**2).sum() / 2))
    return sums


def epoch(what, x, y, order, size, care=False):
    """A case of train_epoch whose `step` is that of `fit_line`. It takes nothing but what is due,
    so its losses are known before. care: look at `n` and the mean's value, too."""
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    sums, calls = fit_line(x, y, parts), []

    def step(images, labels, n):
        batch = len(calls)
        calls.append(batch)
        if batch >= len(parts):
            raise Wrong(f"`step` was called again after the last of {len(parts)} batches")
        compare(images, mx(x[parts[batch]]), f"the array of images of batch {batch}")
        compare(labels, mx(y[parts[batch]]), f"the array of labels of batch {batch}")
        if care:
            compare(n, len(parts[batch]), f"`n` of batch {batch}")
        return sums[batch]

    def check(mean):
        if len(calls) != len(parts):
            raise Wrong(f"`step` was called for {len(calls)} of {len(parts)} batches")
        if not np.isfinite(read_number(mean, "the mean loss")):
            raise Wrong(f"the mean loss is {mean}")
        if care:
            compare(mean, Near(sum(sums) / len(order), 1e-12), "the mean loss of all examples")

    return Case(f"{what}, {len(x)} of them, an order of {len(order)}, batches of {size}",
                "train_epoch", [mx(x), mx(y), numpy(order), size, step], check)


def epoch_values():
    """An epoch: the batches, in order"""
    y = np.arange(7, dtype="float32")
    yield epoch("numbered images", np.stack([10 * y, 10 * y + 1], axis=1), y,
                np.array([3, 1, 4, 0, 5, 2, 6]), 3)
    rng = np.random.default_rng(6)
    for total, m, size in ((9, 9, 4), (12, 12, 3), (11, 8, 5), (5, 5, 7), (10, 9, 2), (6, 6, 1),
                           (4, 4, 4), (1, 1, 1), (30, 25, 12)):
        for shape in ((3,), (), (2, 1, 2)):
            yield epoch(f"images of shape {shape}",
                        rng.normal(size=(total, *shape)).astype("float32"),
                        rng.permutation(total).astype("float32"), rng.permutation(total)[:m], size)
    yield epoch("examples named twice", rng.normal(size=(5, 2)).astype("float32"),
                np.arange(5, dtype="float32"), np.array([4, 4, 1, 0, 1, 4, 2]), 3)
    # 49 * (1 / 49) is below 1.
    x, y = rng.normal(size=(49, 1)).astype("float32"), np.arange(49, dtype="float32")
    for what in ("first", "second"):
        yield epoch(f"{what} epoch", x, y, rng.permutation(49), 49)


def epoch_care():
    """An epoch: n and the mean loss, types of numbers, the caller's arrays"""
    yield epoch("equal images", np.ones((3, 1), "float32"), np.array([0, 0, 2], "float32"),
                np.arange(3), 2, care=True)
    rng = np.random.default_rng(7)
    for total, m, size in ((7, 7, 3), (8, 8, 4), (12, 9, 4), (5, 5, 8), (11, 11, 5), (1, 1, 1),
                           (6, 5, 1)):
        yield epoch("examples in float64", rng.normal(size=(total, 2)), rng.normal(size=total),
                    np.arange(m), size, care=True)
    yield epoch("equal examples, some named twice", np.ones((7, 2)), np.ones(7),
                np.array([2, 0, 2, 2, 1, 0, 0]), 4, care=True)
    images = np.arange(10, dtype="uint8").reshape(5, 2)
    for kind in ("int32", "int64"):
        yield epoch(f"images in uint8, large labels in {kind}", images,
                    np.array([BIG, 0, -BIG, 7, BIG + 2], kind), np.arange(5), 2, care=True)
    yield epoch("large images in int32", BIG + 2 * np.arange(6, dtype="int32").reshape(3, 2),
                np.arange(3, dtype="uint8"), np.arange(3), 2, care=True)
    y = np.arange(4, dtype="float32")
    images = np.stack([y, 2 * y], axis=1)
    yield epoch("a first batch without a loss", images, 3 * y + (y > 1), np.arange(4), 2,
                care=True)
    for n, kind in ((300, "uint8"), (2100, "float16")):   # it doesn't hold all of their numbers
        x, y = rng.integers(0, 256, (n, 2)).astype(kind), rng.integers(0, 10, n).astype(kind)
        yield epoch(f"images and labels in {kind}", x, y, np.arange(n), n // 2, care=True)
