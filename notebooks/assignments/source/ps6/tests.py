"""What solutions of assignment 6 are judged by. See `marking.cases`.

What is expected is worked out in fractions, which are exact. Where two things are equal, numbers
are chosen with which floating-point numbers are exact too: no test depends on their last digits.
"""

import itertools
from fractions import Fraction

import numpy as np
from marking.cases import (Anything, Case, Near, Wrong, compare, cpu, describe, mx, near,
                           read_number)

NAN, INF = float("nan"), float("inf")
BIG = 2**24   # above it float32 can't hold each whole number


def share(n, speeds):
    """The sizes of shards by the rules of exercise 1."""
    total = sum(map(Fraction, speeds))
    due = [n * Fraction(v) / total for v in speeds]
    first = sorted((-(d % 1), i) for i, d in enumerate(due))[: int(sum(d % 1 for d in due))]
    sizes = [int(d) + any(i == j for _, j in first) for i, d in enumerate(due)]
    if 0 in sizes:
        rest = iter(share(n - sizes.count(0), [v for v, s in zip(speeds, sizes) if s]))
        return [next(rest) if s else 1 for s in sizes]
    return sizes


def cut(n, speeds, what="", show=False):
    """A case of cut. show: whether the student is told the speeds."""
    k, expected = len(speeds), share(n, speeds)

    def check(found):
        compare(found, [Anything()] * k, "the list of sizes")
        sizes = [read_number(size, f"size {i}") for i, size in enumerate(found)]
        say = f"[{', '.join(f'{size:.15g}' for size in sizes)}]"
        if sum(sizes) != n:
            raise Wrong(f"{say} add up to {sum(sizes):.15g}")
        if min(sizes) < 1:
            raise Wrong(f"{say}, so a device has nothing")
        if sizes != expected:
            raise Wrong(f"{say}, not {expected}" if show else
                        f"{say} are not the sizes by the rules")

    return Case(f"{n} examples, " + (f"speeds {speeds}" if show else f"{k} devices") + what,
                "cut", [n, list(speeds)], check)


def cut_values():
    """Shards in proportion: sizes, remainders, equal remainders"""
    for n, speeds in ((256, [3, 1]), (10, [3, 1, 1, 1]), (100, [0.2, 0.3, 0.4])):
        yield cut(n, speeds, show=True)
    for n, speeds in ((7, [5]), (600, [1, 2, 3, 4, 5, 6]), (128, [7.5] * 4), (50, [1, 4, 3]),
                      (37, [3, 1, 2, 1, 1]), (12, [0.5, 0.25, 0.75]), (11, [1e-20, 3e-20, 7e-20]),
                      (23, [2e200, 1e200])):
        yield cut(n, speeds)
    # Remainders of different speeds are equal where n and the sum, the largest and the smallest
    # speed are powers of two: in whatever order a solution multiplies, nothing is rounded.
    for n, speeds in ((10, [1, 1, 1, 1]), (11, [2, 2, 2]), (31, [7] * 9), (50, [3.5] * 20),
                      (17, [1, 3, 3, 1]), (30, [5, 1, 5, 5]), (16, [4, 5, 7, 16]),
                      (16, [16, 7, 5, 4]), (16, [2, 2, 3, 5, 8, 8, 2, 2]),
                      (16, [2, 2, 8, 8, 5, 3, 2, 2]),
                      (64, [3, 5] * 8 + [8] * 4 + [2] * 16)):
        yield cut(n, speeds, ", equal remainders")
    for speeds in ([6019, 1094, 5914], [7736, 9285, 4366], [8791, 1935, 9695],
                   [79876, 65405, 61448]):
        yield cut(100, speeds, ", remainders that differ by less than 1e-4")
    for speeds in ([1026362, 8822384, 55118103], [4486628, 6277773, 48940431]):
        yield cut(100, speeds, ", remainders that differ by less than 1e-6")
    rng = np.random.default_rng(61)
    for k in (2, 3, 4, 5, 6, 9, 12):
        for _ in range(6):
            yield cut(int(rng.integers(20 * k, 400)), rng.uniform(100, 900, k).tolist())


def cut_few():
    """Shards in proportion: nobody has nothing"""
    for n, speeds in ((3, [90, 5, 5]), (11, [3, 74, 40])):
        yield cut(n, speeds, show=True)
    for n, speeds in ((1, [8]), (4, [1, 900, 2, 1]), (5, [100, 1, 1]), (13, [153, 8, 4, 31, 14]),
                      (2, [1, 7]), (22, [3, 36, 1]), (21, [29, 15, 4, 1, 1]), (9, [2, 1e-12, 1e9]),
                      (24, [1, 17, 72, 2, 9]), (6, [10, 1, 1, 10]), (9, [5] * 9),
                      (16, [1, 15] * 6)):
        yield cut(n, speeds, ", very different speeds" if len(set(speeds)) > 1 else "")
    for n, speeds in ((17, [1 / 16, 4, 5, 7, 16]), (17, [7, 1 / 16, 16, 5, 4]),
                      (17, [2, 2, 3, 5, 8, 8, 2, 2, 1 / 16])):
        yield cut(n, speeds, ", equal remainders when the others share")
    # Readings of rule 3 that most inputs don't tell apart. The first three: who is due less than
    # one, and gets one by rule 2, goes on sharing. The fourth: all who have nothing are done at
    # once. The last two: the others share anew 9 and 14 times.
    for n, speeds in ((10, [7, 2, 18]), (9, [38, 17, 159]), (7, [8, 3, 7, 19]),
                      (13, [5, 8, 1, 1, 7, 3]),
                      (15, [53, 46, 40, 47, 220, 53, 21, 223, 38, 4, 1, 21]),
                      (21, [64, 2, 15, 303, 124, 114, 125, 125, 6, 308, 105, 92, 3, 105, 115, 106,
                            110, 61, 23, 135])):
        yield cut(n, speeds, f", speeds {speeds}")
    rng = np.random.default_rng(62)
    for k in (2, 3, 4, 5, 6, 9, 12):
        for _ in range(6):
            yield cut(int(rng.integers(k, 5 * k)), (10 ** rng.uniform(0, 3, k)).tolist(),
                      ", very different speeds")


def read_whole(found, at):
    """An integer, Python's or NumPy's."""
    if not isinstance(found, (int, np.integer)) or isinstance(found, bool):
        raise Wrong(f"{at} is {describe(found)}, not a whole number")
    return int(found)


def whole(n, speeds, expected=None, what=""):
    """A case of cut that is judged for whole numbers. Which they are is for the other tests,
    unless they are `expected` here."""
    def check(found):
        compare(found, [Anything()] * len(speeds), "the list of sizes")
        sizes = [read_whole(size, f"size {i}") for i, size in enumerate(found)]
        if expected and sizes != expected:
            raise Wrong("these are not the sizes by the rules")

    return Case(f"{n:,} examples, {len(speeds)} devices{what}", "cut", [n, list(speeds)], check)


def cut_care():
    """Shards in proportion: errors, whole numbers"""
    for n, k in ((2, 3), (1, 2), (3, 4), (0, 1), (11, 12)):
        yield Case(f"{n} examples, {k} devices", "cut", [n, [5] * k], raises=ValueError)
    for speeds in ([1, 0], [0], [2, 0, 1], [0.0, 2], [3, -1], [-1, -3], [-1, 3, 2], [1, -3, 2],
                   [NAN], [2, NAN], [NAN, 2, 2], [1, NAN, 2], [INF], [INF, 2, 2], [2, INF, 2],
                   [2, 2, INF], [-INF, 2], [INF, INF]):
        yield Case(f"speeds {speeds}", "cut", [40, speeds], raises=ValueError)
    for n, speeds in ((40, [0, 0]), (40, [-2, -2]), (1, [0]), (1, [NAN]), (2, [1, 0]), (2, [-1, -1]),
                      (3, [1, INF, 1]), (3, [NAN, 1, 1]), (40, [-1, -1, 5]), (1, [1, 0]),
                      (-1, [1])):
        yield Case(f"{n} examples, speeds {speeds}", "cut", [n, speeds], raises=ValueError)
    for n, speeds in ((60, [100, 300, 200]), (7, [5]), (10, [3, 1, 1, 1]), (10, [1.5, 2.25]),
                      (3, [90, 5, 5]), (9, [2] * 9), (24, [1, 17, 72, 2, 9])):
        yield whole(n, speeds)
    for speeds in ([BIG + 1, BIG - 1], [BIG - 1, BIG + 1], [5 * BIG + 3, 2 * BIG + 1, BIG + 7]):
        yield whole(sum(speeds), speeds, speeds, ", as many as they do in a second")


def average(means, sizes, there, within=1e-5, what="", returns=None):
    """A case of average. means: the gradients, as NumPy arrays."""
    used = [i for i, size in enumerate(sizes) if size]
    mean = sum(Fraction(sizes[i], sum(sizes)) * _to_fractions(means[i]) for i in used)
    mean, scale = mean.astype(means[0].dtype), max(np.abs(means[i]).max() for i in used)
    due = [near(mean, within, d, scale) for d in there]

    def check(found):
        for i, (gradient, expected) in enumerate(zip(found, due)):
            compare(gradient, expected, f"gradient {i} after the call")
            if gradient.gradient:
                raise Wrong("`attach_grad` was called on what is a gradient")

    return Case(f"{len(sizes)} devices, sizes {sizes}{what}", "average",
                [[mx(m, on=d) for m, d in zip(means, there)], list(sizes)], returns,
                changes={"gradients": check})


def _to_fractions(values):
    return np.vectorize(Fraction, otypes=[object])(values.astype("float64"))


def average_values():
    """Gradients by the examples behind them: each becomes the mean"""
    def case(means, sizes, there, what=""):
        return average(means.astype("float32"), sizes, there, 1e-5, what, returns=Anything())

    rng = np.random.default_rng(63)
    yield case(np.array([[2], [10]]), [3, 1], [cpu(0), cpu(1)], ", holding 2 and 10")
    for sizes in ([3, 1], [5, 2, 1], [1, 2, 4], [2, 2], [7, 1, 9, 3], [9, 1, 1, 4, 2], [4],
                  [1, 2, 3, 4, 5, 6, 7, 8, 9], [31, 2, 2, 9, 5, 1, 1, 8, 3, 12, 7, 4]):
        k = len(sizes)
        yield case(rng.normal(size=(k, 3, 2)), sizes, [cpu(k - i) for i in range(k)])
    for sizes, numbers in (([5, 3], [6, 1]), ([1, 6], [0, 3]), ([2, 1, 4], [7, 2, 4]), ([3], [5])):
        for shape in ((5,), (1,), (4, 1), (2, 3, 2), (3, 1, 2, 2)):
            yield case(rng.normal(size=(len(sizes), *shape)), sizes, [cpu(i) for i in numbers],
                       f", shape {shape}")


def average_care():
    """Gradients by the examples behind them: nothing of those without, float64, errors"""
    def case(means, sizes, what, numbers=None, within=1e-5):
        numbers = numbers or range(len(sizes))
        return average(means, sizes, [cpu(i) for i in numbers], within, what)

    yield case(np.array([[5], [NAN]], "float32"), [4, 0], f", {NAN} left over")
    rng = np.random.default_rng(64)
    for sizes, numbers in (([0, 3], [4, 0]), ([3, 0], [1, 2]), ([2, 0, 3], [3, 0, 5]),
                           ([0, 0, 5, 0], [9, 4, 6, 1]), ([1, 0, 4, 0], None), ([0, 2, 1], None),
                           ([0, 5, 0, 0, 7, 0, 2, 1, 0], None)):
        for left in (NAN, INF, -INF, 7):
            means = rng.normal(size=(len(sizes), 2, 2)).astype("float32")
            means[np.equal(sizes, 0)] = left
            yield case(means, sizes, f", {left} left over", numbers)
    for sizes in ([3, 3], [3, 1], [5, 2, 4], [3], [0, 3, 7], [6, 1, 0], [7, 1, 9, 3, 3, 11],
                  [3, 7, 2, 5, 9, 11, 1, 6, 13], [BIG + 1, BIG // 2 + 1],
                  [5, 3 * BIG + 1, BIG + 1]):
        for shape in ((4,), (2, 3)):
            yield case(rng.normal(size=(len(sizes), *shape)), sizes, ", float64", None, 1e-12)
    means = np.array([[1.0, NAN], [3, 4]])
    yield Case("2 devices, sizes [2, 1], a gradient that is not a number", "average",
               [[mx(m, on=cpu(i)) for i, m in enumerate(means)], [2, 1]],
               changes={"gradients": [near([5 / 3, NAN], 1e-12, cpu(i)) for i in range(2)]})
    for sizes in ([5, 0, 3], [1000, 1001, 999]):
        yield average(np.array([[5.0], [7.0], [9.0]]), sizes, [cpu(i) for i in range(3)],
                      1e-12, ", holding 5, 7 and 9")
    for k, sizes in ((2, [4]), (2, [1, 1, 2]), (3, [2, 2]), (1, []), (3, [1, 1, 1, 1]),
                     (9, [1] * 8), (2, [3, 1, 0]), (1, [3, 0])):
        yield Case(f"{k} gradients, sizes {sizes}", "average",
                   [[mx(np.array([i + 1.0]), on=cpu(i)) for i in range(k)], sizes],
                   raises=ValueError)


def seconds(n, speeds, cost):
    """A case of step_seconds: the slowest device's share by its speed, and the all-reduce."""
    k, exact = len(speeds), [Fraction(v) for v in speeds]
    talk = Fraction(cost) if k > 1 else 0
    due = {"alone": Fraction(n) / max(exact),
           "with equal shares": max(Fraction(n, k) / v for v in exact) + talk,
           "with shares in proportion": max(n * v / sum(exact) / v for v in exact) + talk}

    def check(found):
        compare(found, (Anything(),) * 3, "what is returned")
        for one, (way, expected) in zip(found, due.items()):
            took = read_number(one, f"the time {way}")
            if k == 1 and cost and abs(took - float(expected + Fraction(cost))) <= 1e-9:
                raise Wrong(f"{way}: a single device waits for no all-reduce")
            compare(one, Near(float(expected), 1e-12), f"the time {way}")

    return Case(f"{k} devices", "step_seconds", [n, list(speeds), cost], check)


def time_seconds():
    """The seconds of a step: alone, equal shares, shares in proportion"""
    yield seconds(240, [1600, 400, 400], 0.01)
    rng = np.random.default_rng(65)
    for k in (1, 2, 3, 4, 6, 9, 12):
        for _ in range(3):
            yield seconds(int(rng.integers(30, 600)), rng.uniform(50, 2000, k).tolist(),
                          float(rng.uniform(0.01, 0.4)))
    for n, speeds, cost in ((7, [3], 0.5), (7, [3, 3], 0), (9, [4] * 3, 0.5), (100, [1, 2, 4], 0.25),
                            (100, [4, 2, 1], 3), (5, [2, 1, 3], 0.125), (5, [2, 3, 1], 7),
                            (1, [90, 400, 20, 60], 0.001), (BIG + 1, [BIG + 3, BIG + 1], 1),
                            (64, [1e-6, 1e6, 2.5], 1e-3)):
        yield seconds(n, speeds, cost)


def whom(n, speeds, costs, what=None):
    """A case of whom, judged by the times of all choices that could be the fastest."""
    k, exact, talk = len(speeds), [Fraction(v) for v in speeds], [Fraction(c) for c in costs]
    times = {who: n / sum(exact[i] for i in who) + talk[m - 1]
             for m in range(1, k + 1) if talk[m - 1] < n / max(exact)
             for who in itertools.combinations(range(k), m)}
    best = min(times, key=lambda who: (times[who], len(who), who))

    def check(found):
        if type(found) not in (list, tuple) or len(found) != 2:
            raise Wrong(f"what is returned is {describe(found)}, not (chosen, seconds)")
        chosen, took = found
        if type(chosen) is not list:
            raise Wrong(f"`chosen` is {describe(chosen)}, not a list")
        who = tuple(read_whole(i, "an entry of `chosen`") for i in chosen)
        if not who or list(who) != sorted(set(who)) or not set(who) <= set(range(k)):
            raise Wrong(f"{list(who)} aren't numbers of devices, ascending")
        if who not in times or times[who] > times[best]:
            raise Wrong(f"another choice is faster than {list(who)}")
        if len(who) > len(best):
            raise Wrong("fewer devices are just as fast")
        if who != best:
            raise Wrong("of equally fast devices, not those with the lower numbers")
        compare(took, Near(float(times[best]), 1e-12), "the time that they take")

    return Case(what or f"{k} devices", "whom", [n, list(speeds), list(costs)], check)


def time_whom():
    """Whether the slow one pays: the choice and its time, choices that are equally fast"""
    for speeds, costs in (([1600, 400], [0, 0.01]), ([400, 1600], [0, 0.05])):
        yield whom(256, speeds, costs, f"256 examples, speeds {speeds}, costs {costs}")
    for n, speeds, costs in ((300, [70], [0]), (512, [100, 900, 500, 1000], [0, 0.05, 0.9, 0.06]),
                             (96, [5, 7, 6], [0, 9, 1]), (60, [3, 9, 1], [0, 20, 30]),
                             (128, [90, 1000, 800, 30], [0, 0.02, 0.04, 0.06]),
                             (BIG, [BIG, BIG + 1, BIG - 1], [0, 2, 3]),
                             (BIG + 1, [BIG + 1, BIG + 3], [0, 0.125])):
        yield whom(n, speeds, costs)
    for n, speeds, costs, what in (
            (64, [300, 200, 100], [0, 0, 0], "no costs"),
            (900, [60, 300, 100, 200], [0, 1, 1, 1], "equal costs"),
            (900, [60, 300, 100, 200], [0, 4, 4, 4], "equal costs"),
            (600, [30, 80, 100, 20], [0, 5, 3, 2], "costs that go down"),
            (600, [30, 80, 100, 20], [0, 9, 8, 7], "costs that go down"),
            (1000, [100, 100], [0, 4.998], "the choice makes little difference"),
            (1000, [100, 100], [0, 5.002], "the choice makes little difference"),
            (1000, [100, 100], [0, 5 - 1e-6], "the choice makes little difference"),
            (1000, [100, 100], [0, 5 + 1e-6], "the choice makes little difference"),
            (1000, [100, 100], [0, 5 - 1e-8], "the choice makes little difference"),
            (9, range(1, 10), [0, 3, 1, 4, 1, 5, 0.5, 6, 0.125], "costs that go up and down")):
        yield whom(n, speeds, costs, f"{len(speeds)} devices, {what}")
    # One number of devices is best, and many beside it aren't worth having.
    for costs in ([0] + [40] * 7 + [1], [0, 40, 40, 40, 1] + [40] * 4,
                  [0, 1, 40, 40, 40, 40, 1, 40, 40]):
        yield whom(90, [5] * 9, costs, f"90 examples, nine devices of speed 5, costs {costs}")
    rng = np.random.default_rng(66)
    for k in (2, 3, 4, 5, 6, 9, 12):
        for _ in range(4 if k < 9 else 1):
            costs = [0, *rng.uniform(0, 0.3, k - 1).tolist()]
            yield whom(256, rng.uniform(50, 1500, k).tolist(), costs)
    for n, speeds, costs in (
            (256, [20, 100, 20, 20, 20, 20], [0] + [0.8] * 5), (64, [16, 16], [0, 9]),
            (144, [2] * 9, [0, 50, 3] + [60] * 6),
            (512, [4, 1, 4] + [1] * 17, [0, 70, 60, 10] + [200] * 16),
            (64, [3, 5, 8, 5], [0, 1, 4, 9]), (60, [7, 7, 7, 7, 7], [0, 9, 9, 1, 9])):
        yield whom(n, speeds, costs, f"{len(speeds)} devices, some of which are equally fast")
    for n, speeds, costs in (  # equal, and exact in binary
            (64, [16, 16], [0, 2]), (64, [8, 16, 8], [0, 1, 0.5]), (64, [16, 32, 16], [0, 0.25, 1]),
            (64, [4, 16, 16, 16], [0, 0.5, 4, 4]), (64, [8, 8, 8, 8], [0, 4, 9, 6]),
            (128, [8, 16, 32, 8], [0, 9, 2, 2]), (64, [4, 4, 8], [0, 9, 4])):
        yield whom(n, speeds, costs, f"{len(speeds)} devices, choices that are equally fast")
