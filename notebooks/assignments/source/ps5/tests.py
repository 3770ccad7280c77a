"""What solutions of assignment 5 are judged by. See `marking.cases`."""

import re
from fractions import Fraction

import numpy as np
from marking.cases import Anything, Array, Case, Near, Wrong, compare, describe, numpy, read_number


class Machine:
    """The notebook's machine, with a log of what it was asked for: a letter for each call, and C
    where the clock was read with work in the queue."""

    def __init__(self, costs, handing, left, now):
        self.costs, self.handing = np.ravel(costs).tolist(), float(handing)
        self.now, self.done = float(now), float(now + left)
        self.pushed, self.log = 0, ""

    def push(self):
        self.now += self.handing
        cost = self.costs[min(self.pushed, len(self.costs) - 1)]
        self.done = max(self.done, self.now) + cost
        self.pushed += 1
        self.log += "p"

    def wait(self):
        self.now = max(self.now, self.done)
        self.log += "w"

    def clock(self):
        self.log += "c" if self.now >= self.done else "C"
        return self.now


def draw_seconds(rng, *shape):
    """1 to 3 s each: no sum of them is rounded, and none of them fits into float32."""
    return (rng.integers(2**29, 3 * 2**29, shape) * 2 + 1) / 2**30


def time_rounds(costs, handing):
    """Seconds of each round. Its end is put off by each step: by the time until it is handed out,
    and then its own work and that of the steps after it."""
    rest = np.cumsum(costs[:, ::-1], axis=1)[:, ::-1]
    return (handing * np.arange(1, costs.shape[1] + 1) + rest).max(axis=1)


def check_log(machine, steps, rounds):
    """Raises Wrong where other steps were handed out than in the rounds, or waits lie elsewhere."""
    due = (1 + rounds) * steps
    if machine.pushed != due:
        raise Wrong(f"{machine.pushed} of {due} steps were handed out")
    order = re.sub("[cC]", "", machine.log)
    if re.search(f"p{{{steps + 1}}}", order):
        raise Wrong("two rounds were handed out without a wait in between")
    if not re.fullmatch(f"w*(p{{{steps}}}w*)*", order):
        raise Wrong("within a round, a step was waited for")


def measured(what, costs, handing=0.0, left=0.0, now=1000.0, time=True, log=False):
    """A case of `measure` on a machine whose steps take `costs`, with a row for each round.

    time, log: whether to look at what is returned, and at how it was found.
    """
    costs = np.array(costs, float)
    rounds, steps = len(costs) - 1, costs.shape[1]
    machine = Machine(costs, handing, left, now)
    each = time_rounds(costs, handing) / steps
    right, ordered = np.median(each[1:]), sorted(each[1:])
    mistakes = [("this is the time of a round, not of a step", right * steps),
                *(("this is one of the two rounds in the middle", ordered[place])
                  for place in (rounds // 2, (rounds - 1) // 2)),
                ("the round that warms up was counted", np.median(each)),
                ("the round that warms up was counted, and the last was not", np.median(each[:-1])),
                ("this is the mean over the rounds, not the median", each[1:].mean()),
                ("this is the quickest round, not the median", ordered[0])]

    def check(found):
        if log:
            check_log(machine, steps, rounds)
        if time:
            number = read_number(found)
            for mistake, value in mistakes:
                if abs(number - value) <= 1e-12 * value and value != right:
                    raise Wrong(f"{number:.6g} s: {mistake}")
            if "C" in machine.log and not abs(number - right) <= 1e-12 * right:
                raise Wrong("the clock was read while work was still in the queue")
            compare(found, Near(right, 1e-12), "the time of a step")

    return Case(f"rounds={rounds}, steps={steps}, {what}", "measure",
                [machine.push, machine.wait, machine.clock, steps, rounds], returns=check,
                typed=f"on_machine({costs.tolist()}, {handing}, {left}, {steps}, {rounds})")


def measure_values():
    """The time of a step: what is handed out, what is waited for, and what is timed"""
    yield measured("the notebook's example", [[30, 20], [10, 12]], 1, 5, log=True)
    rng = np.random.default_rng(51)
    for steps, left, now in ((1, 0, 0), (2, 0, 500), (4, 60, 0), (3, 400, 9000), (7, 1.5, 2),
                             (12, 9, 700)):
        costs = draw_seconds(rng, 2, steps)
        costs[0] *= 10   # warms up
        yield measured(f"with {left} s of work in the queue", costs, draw_seconds(rng) / 8, left,
                       now, log=True)
    for rounds, steps, handing in ((2, 3, 0.25), (3, 1, 0.125), (3, 4, 8), (6, 2, 0.5), (9, 3, 4),
                                   (1, 5, 16), (4, 2, 2)):
        costs = np.tile(draw_seconds(rng, steps), (rounds + 1, 1))
        costs[0] *= 8
        yield measured(f"each round like the one before, {handing} s to hand out a step", costs,
                       handing, 3, log=True)
    for rounds, steps in ((5, 2), (4, 3), (7, 1), (10, 2), (3, 9)):
        costs = draw_seconds(rng, rounds + 1, steps)
        costs[0] *= 10
        costs[rng.integers(1, rounds + 1)] *= 40   # disturbed
        yield measured("one round disturbed", costs, 0.25, 2, time=False, log=True)


def measure_rounds():
    """The time of a step: the median over the rounds, errors"""
    yield measured("the notebook's example",
                   [[30, 20], [10, 12], [90, 12], [9, 11], [10, 8], [45, 46]])
    rng = np.random.default_rng(52)
    for rounds, steps in ((5, 2), (4, 3), (2, 1), (6, 4), (3, 2), (7, 1), (1, 3), (9, 2), (12, 2),
                          (2, 1), (5, 2)):
        costs = draw_seconds(rng, rounds + 1, steps)
        costs[0] *= 10                                 # warms up
        costs[rng.integers(1, rounds + 1)] *= 3        # disturbed
        yield measured("one round disturbed", costs)
    for disturbed in range(1, 7):
        costs = draw_seconds(rng, 7, 2) * rng.permutation(np.arange(1, 8))[:, None]
        costs[0], costs[disturbed] = 4 * costs[0], 90
        yield measured(f"round {disturbed} disturbed", costs)
    for rounds in (2, 3, 4, 5):
        costs = np.sort(draw_seconds(rng, rounds + 1, 3), axis=0)
        yield measured("each round slower than the one before", costs)
        yield measured("each round quicker than the one before", costs[::-1], now=0)
    # Times that are equal, side by side and apart, and rounds in which the clock stands still.
    for times in ((3, 3, 3, 8, 9), (3, 8, 3, 9, 3), (0, 0, 0, 4, 5), (4, 0, 5, 0, 0)):
        yield measured(f"rounds of {times} seconds after one of 30", [[30], *([t] for t in times)])
    for steps, rounds in ((0, 3), (3, 0), (2, -1), (-2, 3), (-1, -1), (0, 0)):
        machine = Machine([1.0], 0.0, 0.0, 1000.0)
        yield Case(f"{rounds} rounds of {steps} steps", "measure",
                   [refuse, machine.wait, machine.clock, steps, rounds], raises=ValueError)


def refuse():
    raise Wrong("a step was handed out before the ValueError")


def check_numbers(names, due, within, mistakes=()):
    """A function that raises Wrong unless it gets the numbers `due`, in a tuple, list or array.

    mistakes: [(what is said, numbers that come of it)].
    """
    def check(found):
        if isinstance(found, Array) and found.device is None and found.values.ndim == 1:
            found = list(found.values)
        if type(found) not in (list, tuple) or len(found) != len(due):
            raise Wrong(f"not {len(due)} numbers, but {describe(found)}")
        numbers = [read_number(one, name) for one, name in zip(found, names)]
        for text, wrong in mistakes:
            if np.allclose(numbers, wrong, 1e-6, 0) and not np.allclose(due, wrong, 1e-6, 0):
                raise Wrong(text)
        for one, value, name in zip(found, due, names):
            compare(one, Near(value, within), name)
    return check


def find_line(sizes, seconds):
    """(alpha, bandwidth) of the smallest sum, by the normal equations in fractions."""
    pairs = [(Fraction(size), 1 / Fraction(time))
             for size, time in zip(sizes.tolist(), seconds.tolist())]
    a, b, c = (sum(size**power * weight**2 for size, weight in pairs) for power in range(3))
    d, e = (sum(size**power * weight for size, weight in pairs) for power in range(2))
    return float((c * d - b * e) / (a * c - b * b)), float((a * c - b * b) / (a * e - b * d))


def line(what, sizes, seconds, within=1e-8):
    alpha, bandwidth = find_line(sizes, seconds)
    mistakes = [("the two are the other way round", (bandwidth, alpha)),
                ("the second is seconds per byte, not bytes per second", (alpha, 1 / bandwidth))]
    for text, weight in (("residuals are absolute, not relative", 1),
                         ("residuals are divided by the time twice", seconds**-2.0)):
        slope, start = np.polyfit(sizes.astype(float), seconds, 1, w=weight * np.ones(len(sizes)))
        mistakes.append((text, (start, 1 / slope)))
    return Case(f"{len(sizes)} messages, {what}", "fit_line", [numpy(sizes), numpy(seconds)],
                returns=check_numbers(("alpha", "the bandwidth"), (alpha, bandwidth), within,
                                      mistakes))


def line_values():
    """Latency and bandwidth: values"""
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    yield line("the notebook's example", sizes, 2e-4 + sizes / 5e8)
    rng = np.random.default_rng(53)
    for n, start, speed in ((8, 1e-4, 1e9), (12, 3e-5, 2e8), (30, 2e-3, 8e9), (5, 5e-4, 4e7)):
        sizes = np.concatenate([4.0 ** rng.uniform(4, 13, n), 4.0 ** np.array([7, 7, 7, 11])])
        rng.shuffle(sizes)
        for _ in range(2):
            seconds = (start + sizes / speed) * (1 + 0.05 * rng.standard_normal(n + 4))
            yield line("scattered", sizes, seconds)
    for sizes in (np.array([7e4, 3e3]), np.array([5e3, 9e5, 5e3]), np.array([4e5, 4e5, 2e3, 2e3])):
        times = (1e-4 + sizes / 1e9) * (1 + 0.01 * rng.standard_normal(len(sizes)))
        yield line("of two sizes", sizes, times)
    for sizes in (np.linspace(9e6, 1e3, 10), np.linspace(10, 900, 7)):
        times = (0.3 + sizes / sizes.mean()) * (1 + 0.05 * rng.standard_normal(len(sizes)))
        yield line("in descending order" if sizes[0] > 10 else "small", sizes, times)
    for what, sizes, times in (
            ("one of them three times, apart", (1, 5, 1, 3, 1), (2.0, 6.0, 2.0, 5.0, 2.0)),
            ("one of them three times, side by side", (5, 1, 1, 1, 3), (6.0, 2.0, 2.0, 2.0, 5.0)),
            ("two sizes that took the same time", (1, 2, 4, 5), (3.0, 3.0, 5.0, 7.0))):
        yield line(f"{what}: sizes {sizes}, times {times}", np.array(sizes), np.array(times))


def line_care():
    """Latency and bandwidth: whole numbers, the caller's arrays, errors"""
    sizes = np.array([4000, 1000, 2000])
    yield line("the notebook's example", sizes, 1 + sizes / 1000)
    rng = np.random.default_rng(54)
    for most in (10**10, 7 * 10**9, 2 * 10**9, 10**6):
        sizes = (most * np.array([0.5, 0.001, 1, 0.25, 0.03])).astype("int64")
        yield line(f"int64 up to {most:.0e} bytes", sizes, 0.01 + sizes / 2e9)
        sizes = rng.integers(most // 1000, most, 9)
        yield line(f"int64 up to {sizes.max():.2e} bytes", sizes, 0.003 + sizes / 7e8)
    sizes = np.array([10000.0, 10050, 10025])
    yield line("sizes that are close", sizes, 0.005 + sizes / 1e6)
    sizes = 1e8 * np.array([0.5, 0.001, 1, 0.25, 0.03])
    yield line("float64", sizes, 0.01 + sizes / 2e9)
    # So close that a solution in float64 need not have more than a few digits.
    sizes = np.array([200000, 200001, 200002])
    yield line("of 200000, 200001 and 200002 bytes", sizes, 0.2 + sizes / 1e6, 1e-3)
    for sizes in (np.array([8.0]), np.full(3, 512.0), np.full(2, 10**10), np.array([]),
                  np.full(3, 1000.1), np.full(6, 777.0)):
        yield Case(f"messages of {sizes.tolist()} bytes", "fit_line",
                   [numpy(sizes), numpy(np.linspace(1, 1.1, len(sizes)))], raises=ValueError)


def predicted(k, images, weak, costs, what="", time_only=False):
    """A case of `predict`, whose times are added up message by message.

    time_only: whether any speed-up and efficiency will do.
    """
    batch = k * images if weak else images
    message = costs["alpha"] + costs["bytes"] / (k * costs["bandwidth"])
    most = len(range(0, batch, k))   # the first device's, when images are dealt out one by one
    step = costs["fixed"] + most * costs["image"] + sum([message] * (2 * k - 2))
    speedup = batch / step / (images / (costs["fixed"] + images * costs["image"]))
    due = (step, Anything(), Anything()) if time_only else (step, speedup, speedup / k)
    return Case(f"k={k}, {images} images{' of each' * weak}{what}", "predict",
                [k, images, weak, dict(costs)],
                returns=check_numbers(("the time of a step", "the speed-up", "the efficiency"),
                                      due, 1e-12))


def draw_costs(rng):
    return {"fixed": rng.uniform(1, 2), "image": rng.uniform(0.1, 0.2),
            "alpha": rng.uniform(0.3, 0.6), "bandwidth": rng.uniform(40, 50),
            "bytes": rng.uniform(200, 300)}


def predict_values():
    """What more devices would bring: seconds, speed-up and efficiency"""
    example = {"fixed": 2.0, "image": 0.5, "alpha": 1.0, "bandwidth": 10.0, "bytes": 40.0}
    yield predicted(2, 48, False, example, ", the notebook's example")
    yield predicted(2, 48, True, example, ", the notebook's example")
    rng = np.random.default_rng(55)
    for k in (3, 1, 4, 2, 5, 8, 12, 3):
        for weak in (False, True):
            images = int(rng.integers(8, 20)) * (1 if weak else k)
            for name in ("alpha", "bytes", "fixed"):
                yield predicted(k, images, weak, {**draw_costs(rng), name: 0.0},
                                f", costs with {name}=0")
            for _ in range(2):
                yield predicted(k, images, weak, draw_costs(rng))
        images = k * int(rng.integers(20, 40))
        yield predicted(k, images, False, draw_costs(rng))
        yield predicted(k, images, True, draw_costs(rng))


def predict_care():
    """What more devices would bring: uneven shards, whole numbers, errors"""
    free = {"fixed": 0.0, "image": 1.0, "alpha": 0.0, "bandwidth": 1.0, "bytes": 0.0}
    yield predicted(3, 10, False, free, ", the notebook's example")
    rng = np.random.default_rng(56)
    whole = {"bytes": 55, "bandwidth": 7, "alpha": 1, "image": 2, "fixed": 3}
    for k, images in ((2, 7), (3, 11), (4, 5), (6, 6), (5, 1001), (1, 1), (9, 26), (16, 17),
                      (200, 401), (1000, 2001), (49, 49), (75, 525)):
        yield predicted(k, images, False, draw_costs(rng))
        yield predicted(k, images, False, whole, ", costs in whole numbers")
    for k, images in ((5, 2), (3, 1), (10, 9), (1, 1)):
        yield predicted(k, images, True, whole, ", costs in whole numbers", time_only=True)
    for k, images, weak in ((0, 4, False), (0, 4, True), (-1, 4, True), (-2, 4, False),
                            (3, 2, False), (8, 7, False), (11, 1, False), (1, 0, False),
                            (4, 0, True), (1, 0, True), (2, -3, True)):
        yield Case(f"k={k}, {images} images{' of each' * weak}", "predict",
                   [k, images, weak, draw_costs(rng)], raises=ValueError)
