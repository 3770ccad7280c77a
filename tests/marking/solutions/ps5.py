# %% right measure: the warm-up apart, a list of times
def measure(push, wait, clock, steps, rounds):
    if steps <= 0 or rounds <= 0:
        raise ValueError("at least one step and one round")
    for _ in range(steps):
        push()
    times = []
    while len(times) < rounds:
        wait()
        start = clock()
        for _ in range(steps):
            push()
        wait()
        times.append(clock() - start)
    return float(np.median(times)) / steps

# %% right measure: a function for a round, and Python's median
def measure(push, wait, clock, steps, rounds):
    import statistics

    if min(steps, rounds) < 1:
        raise ValueError

    def one():
        [push() for _ in range(steps)]
        wait()
        return clock()

    def timed():
        wait()
        return -clock() + one()

    one()
    return statistics.median(timed() / steps for _ in range(rounds))

# %% right measure: readings between rounds, and their differences
def measure(push, wait, clock, steps, rounds):
    if steps < 1:
        raise ValueError("no steps")
    if rounds < 1:
        raise ValueError("no rounds")
    readings = np.zeros(rounds + 1)
    for i in range(rounds + 1):
        for _ in range(steps):
            push()
        wait()
        readings[i] = clock()
    return np.median(np.diff(readings)) / steps

# %% right measure: sorted by hand, both middle ones
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError("nothing to measure")
    found = []
    for number in range(rounds + 1):
        wait()
        before = clock()
        for _ in range(steps):
            push()
        wait()
        if number > 0:
            found.append((clock() - before) / steps)
    found.sort()
    return (found[rounds // 2] + found[(rounds - 1) // 2]) / 2

# %% wrong measure loses measure-values, measure-rounds: no wait at the end | still in the queue
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    taken = []
    for _ in range(1 + rounds):
        wait()
        begin = clock()
        for _ in range(steps):
            push()
        taken.append((clock() - begin) / steps)
    return np.median(taken[1:])

# %% wrong measure loses measure-values, measure-rounds: warm-up still queued | without a wait
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    for _ in range(steps):
        push()
    taken = []
    for _ in range(rounds):
        begin = clock()
        for _ in range(steps):
            push()
        wait()
        taken.append((clock() - begin) / steps)
    return np.median(taken)

# %% wrong measure loses measure-values, measure-rounds: no warm-up | 2 of 4 steps
# from warm-up still queued
#-     for _ in range(steps):
#-         push()
#=     for _ in range(rounds):
#+         wait()

# %% wrong measure loses measure-values, measure-rounds: a warm-up of one step | 3 of 4 steps
# from warm-up still queued
#-     for _ in range(steps):
#-         push()
#+     push()
#=     for _ in range(rounds):
#+         wait()

# %% wrong measure loses measure-values, measure-rounds: the warm-up is kept | up was counted
# from no wait at the end
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return np.median(taken)

# %% wrong measure loses measure-values, measure-rounds: a round's time, not a step's | time of a round
# from no wait at the end
#-         taken.append((clock() - begin) / steps)
#+         wait()
#+         taken.append(clock() - begin)

# %% wrong measure loses measure-values: a wait after every step | was waited for
# from no wait at the end
#=             push()
#+             wait()

# %% wrong measure loses measure-values: one round more than asked | 6 of 4 steps
# from no wait at the end
#-     for _ in range(1 + rounds):
#+     for _ in range(2 + rounds):
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return np.median(taken[1:-1])

# %% wrong measure loses measure-rounds: the mean over the rounds | the mean over
# from no wait at the end
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return np.mean(taken[1:])

# %% wrong measure loses measure-rounds: the quickest round | the quickest
# from no wait at the end
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return min(taken[1:])

# %% wrong measure loses measure-values, measure-rounds: one clock over all the rounds | without a wait
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    for _ in range(steps):
        push()
    wait()
    begin = clock()
    for _ in range(rounds * steps):
        push()
    wait()
    return (clock() - begin) / (rounds * steps)

# %% wrong measure loses measure-rounds: the upper of two in the middle | one of the two rounds
# from no wait at the end
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return sorted(taken[1:])[rounds // 2]

# %% wrong measure loses measure-rounds: no rounds are no error | no ValueError
def measure(push, wait, clock, steps, rounds):
    taken = []
    for _ in range(1 + rounds):
        wait()
        begin = clock()
        for _ in range(steps):
            push()
        wait()
        taken.append((clock() - begin) / max(steps, 1))
    return np.median(taken[1:]) if rounds > 0 else 0.0

# %% wrong measure loses measure-values, measure-rounds: always two steps | steps=1, .* not right
# from no wait at the end
#-         taken.append((clock() - begin) / steps)
#+         wait()
#+         taken.append((clock() - begin) / 2)

# %% wrong measure loses measure-values: the warm-up's steps are waited for | a step was waited for
# from warm-up still queued
#=         push()
#+         wait()

# %% wrong measure loses measure-values: a step more after the last round | 5 of 4 steps
# from no wait at the end
#=             push()
#+         wait()
#=         taken.append((clock() - begin) / steps)
#+     push()

# %% wrong measure loses measure-values: more rounds where one was disturbed | disturbed: \d+ of \d+ steps
# from no wait at the end
#-     taken = []
#-     for _ in range(1 + rounds):
#+     def run():
#-         taken.append((clock() - begin) / steps)
#-     return np.median(taken[1:])
#+         wait()
#+         return (clock() - begin) / steps
#+     taken = [run() for _ in range(1 + rounds)][1:]
#+     if max(taken) > 3 * min(taken):
#+         run()
#+     return np.median(taken)

# %% wrong measure loses measure-values, measure-rounds: warms up in the first call | 1 of 2 steps
WARM = []


def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    taken = []
    for _ in range(rounds + (not WARM)):
        wait()
        begin = clock()
        for _ in range(steps):
            push()
        wait()
        taken.append((clock() - begin) / steps)
    taken = taken if WARM else taken[1:]
    WARM.append(True)
    return np.median(taken)

# %% wrong measure loses measure-values, measure-rounds: remembers steps and rounds | 0 of 4 steps
KNOWN = {}


def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    if (steps, rounds) not in KNOWN:
        taken = []
        for _ in range(1 + rounds):
            wait()
            begin = clock()
            for _ in range(steps):
                push()
            wait()
            taken.append((clock() - begin) / steps)
        KNOWN[steps, rounds] = np.median(taken[1:])
    return KNOWN[steps, rounds]

# %% wrong measure loses measure-values, measure-rounds: clock before wait | still in the queue
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    readings = []
    for _ in range(1 + rounds):
        for _ in range(steps):
            push()
        readings.append(clock())
        wait()
    return np.median(np.diff(readings)) / steps

# %% wrong measure loses measure-values, measure-rounds: waits at two rounds | still in the queue
# from no wait at the end
#-     for _ in range(1 + rounds):
#+     for number in range(1 + rounds):
#=             push()
#+         if number < 2:
#+             wait()

# %% wrong measure loses measure-values, measure-rounds: times in float32 | which is not right
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    taken = np.zeros(1 + rounds, "float32")
    for number in range(1 + rounds):
        wait()
        begin = clock()
        for _ in range(steps):
            push()
        wait()
        taken[number] = (clock() - begin) / steps
    return float(np.median(taken[1:]))

# %% wrong measure loses measure-values, measure-rounds: not a number | the time of a step is nan
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    for _ in range(1 + rounds):
        for _ in range(steps):
            push()
        wait()
    return float("nan")

# %% wrong measure loses measure-values, measure-rounds: reads the machine's costs | __self__
def measure(push, wait, clock, steps, rounds):
    if steps < 1 or rounds < 1:
        raise ValueError
    machine = push.__self__
    machine.pushed = (1 + rounds) * steps
    costs = np.reshape(machine.costs, (1 + rounds, steps))[1:]
    return np.median(machine.handing + costs.sum(axis=1)) / steps

# %% wrong measure loses measure-values, measure-rounds: numbers for the steps | push.* argument
# from no wait at the end
#-         for _ in range(steps):
#-             push()
#+         for step in range(steps):
#+             push(step)
#+         wait()

# %% wrong measure loses measure-rounds: the slowest is left out, not the first | which is not right
# from no wait at the end
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return np.median(sorted(taken)[:-1])

# %% wrong measure loses measure-rounds: a mean without the extremes | which is not right
# from no wait at the end
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     taken = sorted(taken[1:])
#+     return np.mean(taken[1:-1] if rounds > 2 else taken)

# %% wrong measure loses measure-rounds: steps times rounds is checked | -1 rounds of -1 steps
# from no wait at the end
#-     if steps < 1 or rounds < 1:
#+     if steps * rounds < 1:
#=             push()
#+         wait()
#-     return np.median(taken[1:])
#+     return np.median(taken[1:]) if taken else 0.0

# %% right line: polyfit with weights
def fit_line(sizes, seconds):
    if np.ptp(sizes) == 0:
        raise ValueError("one size only")
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return start, 1 / slope

# %% right line: closed form, from weighted means
def fit_line(sizes, seconds):
    if len(set(sizes.tolist())) < 2:
        raise ValueError("alpha and beta can't be told apart")
    w = seconds**-2.0 / (seconds**-2.0).sum()
    b, t = w @ sizes, w @ seconds
    beta = w @ ((sizes - b) * (seconds - t)) / (w @ (sizes - b) ** 2)
    return t - beta * b, 1 / beta


# %% right line: relative residuals by nnls, columns of equal length and no constant below zero
def fit_line(sizes, seconds):
    from scipy.optimize import nnls

    if (sizes == sizes[:1]).all():
        raise ValueError("no two sizes")
    rows = np.stack([np.ones(len(sizes)), sizes], axis=1) / seconds[:, None]
    scale = np.linalg.norm(rows, axis=0)
    (alpha, beta) = nnls(rows / scale, np.ones(len(sizes)))[0] / scale
    return float(alpha), float(1 / beta)

# %% right line: normal equations, summed in a loop
def fit_line(sizes, seconds):
    a = b = c = d = e = 0.0
    for size, time in zip(sizes.tolist(), seconds.tolist()):
        a += 1 / time**2
        b += size / time**2
        c += size * size / time**2
        d += 1 / time
        e += size / time
    if min(sizes) == max(sizes):
        raise ValueError
    beta = (a * e - b * d) / (a * c - b * b)
    return [(d - beta * b) / a, 1 / beta]

# %% wrong line loses line-values: absolute residuals | residuals are absolute, not relative
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    slope, start = np.polyfit(sizes, seconds, 1)
    return start, 1 / slope

# %% wrong line loses line-values: polyfit's weights are squared once more | divided by .* twice
# from absolute residuals
#-     slope, start = np.polyfit(sizes, seconds, 1)
#+     slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds**2)

# %% wrong line loses line-values, line-care: seconds per byte handed back | is seconds per byte
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return start, slope

# %% wrong line loses line-values, line-care: the two the other way round | are the other way round
# from seconds per byte handed back
#-     return start, slope
#+     return 1 / slope, start

# %% wrong line loses line-values, line-care: a line through the origin | alpha is 0, which
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    ratio = sizes / seconds
    return 0.0, (ratio @ ratio) / ratio.sum()

# %% wrong line loses line-values, line-care: a line through logarithms | alpha is 3.01663e-06, which
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    slope, start = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return np.exp(start), 1 / slope

# %% wrong line loses line-values: through the smallest and the largest | scattered: alpha is
def fit_line(sizes, seconds):
    i, j = np.argmin(sizes), np.argmax(sizes)
    if sizes[i] == sizes[j]:
        raise ValueError
    bandwidth = (sizes[j] - sizes[i]) / (seconds[j] - seconds[i])
    return seconds[i] - sizes[i] / bandwidth, bandwidth

# %% wrong line loses line-values: one time for each size | scattered: alpha is
def fit_line(sizes, seconds):
    by_size = dict(zip(sizes.tolist(), seconds.tolist()))
    if len(by_size) < 2:
        raise ValueError
    sizes, seconds = np.array(list(by_size)), np.array(list(by_size.values()))
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return start, 1 / slope

# %% wrong line loses line-care: the caller's arrays are put in order | changed the caller's `sizes`
def fit_line(sizes, seconds):
    if sizes.min() == sizes.max():
        raise ValueError
    order = np.argsort(sizes)
    sizes[:], seconds[:] = sizes[order], seconds[order]
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return start, 1 / slope

# %% wrong line loses line-care: the caller's times become weights | changed the caller's `seconds`
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    seconds **= -1
    rows = np.stack([np.ones(len(sizes)), sizes], axis=1) * seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return alpha, 1 / beta

# %% wrong line loses line-care: squares of int64 overflow | int64 up to
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    w = 1 / seconds**2
    a, b, c = w.sum(), (w * sizes).sum(), (w * sizes**2).sum()
    d, e = (w * seconds).sum(), (w * sizes * seconds).sum()
    beta = (a * e - b * d) / (a * c - b * b)
    return (d - beta * b) / a, 1 / beta

# %% wrong line loses line-care: one size is no error | no ValueError
def fit_line(sizes, seconds):
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return alpha, 1 / beta

# %% wrong line loses line-care: counts messages, not sizes | 512.0. bytes: no ValueError
# from one size is no error
#= def fit_line(sizes, seconds):
#+     if len(sizes) < 2:
#+         raise ValueError

# %% wrong line loses line-values, line-care: no numbers | alpha is nan, which
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    return float("nan"), float("nan")

# %% wrong line loses line-values, line-care: sizes in float32 | which is not right
# from absolute residuals
#-     slope, start = np.polyfit(sizes, seconds, 1)
#+     slope, start = np.polyfit(sizes.astype("float32"), seconds, 1, w=1 / seconds)

# %% wrong line loses line-values, line-care: an answer in float32 | which is not right
# from seconds per byte handed back
#-     return start, slope
#+     return np.float32(start), np.float32(1 / slope)

# %% wrong line loses line-values, line-care: a column for each number | alpha is a NumPy array
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones((len(rows), 1)), rcond=None)[0]
    return alpha, 1 / beta

# %% wrong line loses line-values, line-care: the sum beside the two numbers | not 2 numbers
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (alpha, beta), total, _, _ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    return alpha, 1 / beta, total

# %% wrong line loses line-values: the mean time of each size | scattered: alpha is
def fit_line(sizes, seconds):
    different = np.unique(sizes)
    if len(different) < 2:
        raise ValueError
    means = np.array([seconds[sizes == size].mean() for size in different])
    slope, start = np.polyfit(different, means, 1, w=1 / means)
    return start, 1 / slope

# %% wrong line loses line-values: remembers sizes | scattered: alpha is
KNOWN = {}


def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    key = tuple(sizes.tolist())
    if key not in KNOWN:
        slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
        KNOWN[key] = start, 1 / slope
    return KNOWN[key]

# %% wrong line loses line-values: wants three sizes | of two sizes: ValueError
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 3:
        raise ValueError
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return start, 1 / slope

# %% wrong line loses line-care: megabytes in the caller's array | int64 .* Cannot cast
# from absolute residuals
#-     slope, start = np.polyfit(sizes, seconds, 1)
#+     if sizes.max() > 10**5:
#+         sizes /= 1e6
#+         slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
#+         return start, 1e6 / slope
#+     slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)

# %% wrong line loses line-care: a gigabyte in int32 | int64 up to
# from wants three sizes
#-     if len(np.unique(sizes)) < 3:
#+     sizes = sizes.astype("int32") if sizes.dtype == "int64" else sizes
#+     if len(np.unique(sizes)) < 2:

# %% wrong line loses line-care: a product of int64 overflows | int64 up to
def fit_line(sizes, seconds):
    if len(np.unique(sizes)) < 2:
        raise ValueError
    w = 1 / seconds**2
    products = np.outer(sizes, sizes)
    b, c = w @ sizes, (w * np.diag(products)).sum()
    beta = (w.sum() * (w * seconds) @ sizes - b * (w @ seconds)) / (w.sum() * c - b * b)
    return (w @ seconds - beta * b) / w.sum(), 1 / beta

# %% wrong line loses line-care: no messages at all | \[\] bytes: IndexError
# from wants three sizes
#-     if len(np.unique(sizes)) < 3:
#+     if (sizes == sizes[0]).all():

# %% right predict: images per second first
def predict(k, images, weak, costs):
    batch = k * images if weak else images
    if k < 1 or batch < k:
        raise ValueError("a device without images")

    def step(devices, batch):
        most = (batch + devices - 1) // devices
        ring = 2 * (devices - 1) * costs["alpha"]
        ring += 2 * (devices - 1) / devices * costs["bytes"] / costs["bandwidth"]
        return costs["fixed"] + most * costs["image"] + ring

    rates = [images / step(1, images), batch / step(k, batch)]
    return step(k, batch), rates[1] / rates[0], rates[1] / (k * rates[0])

# %% right predict: message by message, image by image
def predict(k, images, weak, costs):
    if k <= 0:
        raise ValueError("no devices")
    if weak:
        shards = [images] * k
    else:
        shards = [images // k + (r < images % k) for r in range(k)]
    if any(shard < 1 for shard in shards):
        raise ValueError("an empty shard")
    seconds = costs["fixed"]
    seconds += max(shards) * costs["image"]
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(k - 1):
            seconds += costs["alpha"] + costs["bytes"] / (k * costs["bandwidth"])
    efficiency = (costs["fixed"] + images * costs["image"]) / seconds / (1 if weak else k)
    return seconds, k * efficiency, efficiency

# %% right predict: a matrix of terms times the costs
def predict(k, images, weak, costs):
    if k < 1 or (images * k if weak else images) < k:
        raise ValueError
    shard = images if weak else int(np.ceil(images / k))
    c = [costs["fixed"], costs["image"], costs["alpha"], costs["bytes"] / costs["bandwidth"]]
    alone, step = np.array([[1, images, 0, 0], [1, shard, 2 * (k - 1), 2 - 2 / k]]) @ np.array(c)
    ideal = 1 if weak else k
    return step, alone / step * (k / ideal), alone / step / ideal

# %% wrong predict loses predict-values, predict-care: all bytes a message | a step is 24,
def predict(k, images, weak, costs):
    if k < 1 or images < (1 if weak else k):
        raise ValueError

    def seconds(k, largest):
        message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
        return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message

    step = seconds(k, images if weak else -(-images // k))
    speedup = (k if weak else 1) * seconds(1, images) / step
    return step, speedup, speedup / k

# %% wrong predict loses predict-values, predict-care: bytes times bandwidth | a step is 416,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k * costs["bandwidth"]

# %% wrong predict loses predict-values, predict-care: reduce-scatter only | a step is 17,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#+         return costs["fixed"] + costs["image"] * largest + (k - 1) * message

# %% wrong predict loses predict-values, predict-care: 2k messages | a step is 26,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#+         return costs["fixed"] + costs["image"] * largest + 2 * k * message

# %% wrong predict loses predict-values, predict-care: one start for the whole ring | a step is 19,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         talk = 2 * (k - 1) / k * costs["bytes"] / costs["bandwidth"]
#+         talk += costs["alpha"] if k > 1 else 0
#+         return costs["fixed"] + costs["image"] * largest + talk

# %% wrong predict loses predict-values, predict-care: right for k = 2 | k=3, .* time of a step
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         message = costs["alpha"] + costs["bytes"] / 2 / costs["bandwidth"]
#+         return costs["fixed"] + costs["image"] * largest + 2 * message * (k > 1)

# %% wrong predict loses predict-values, predict-care: the fixed part is shared | a step is 19,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#+         return costs["fixed"] / k + costs["image"] * largest + 2 * (k - 1) * message

# %% wrong predict loses predict-values: weak efficiency as the strong | of each.* efficiency is 0.40625,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     return step, speedup, speedup / k
#+     return step, speedup, seconds(1, images) / step / k

# %% wrong predict loses predict-values: weak speed-up of the same batch | of each.* speed-up is 0.8125,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     speedup = (k if weak else 1) * seconds(1, images) / step
#+     speedup = seconds(1, images) / step

# %% wrong predict loses predict-values: weak against one with all images | of each.* speed-up is 1.5625,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     speedup = (k if weak else 1) * seconds(1, images) / step
#+     speedup = seconds(1, k * images if weak else images) / step

# %% wrong predict loses predict-values, predict-care: strong for weak and weak for strong | a step is 32,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#=         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+     weak = not weak

# %% wrong predict loses predict-care: an average shard | 10 images.* 3.33333,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     step = seconds(k, images if weak else -(-images // k))
#+     step = seconds(k, images if weak else images / k)

# %% wrong predict loses predict-care: shards rounded down | 10 images.* is 3,
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     step = seconds(k, images if weak else -(-images // k))
#+     step = seconds(k, images if weak else images // k)

# %% wrong predict loses predict-care: too few images is no error | k=3, 2 images: no ValueError
# from all bytes a message
#-     if k < 1 or images < (1 if weak else k):
#+     if k < 1:
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-care: small weak batches are refused | 2 images of each.*: ValueError
# from all bytes a message
#-     if k < 1 or images < (1 if weak else k):
#+     if k < 1 or images < k:
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-care: the caller's costs are worked on | caller's `costs`
# from all bytes a message
#=         raise ValueError
#+     costs["bytes"] /= costs["bandwidth"]
#+     costs["bandwidth"] = 1.0
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-values, predict-care: the notebook's COSTS | k=3, .* time of a step
# from all bytes a message
#=         raise ValueError
#+     costs = COSTS
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-values, predict-care: remembers k | k=2, 48 images of each.* is 20,
KNOWN = {}


def predict(k, images, weak, costs):
    if k < 1 or images < (1 if weak else k):
        raise ValueError
    if k in KNOWN:
        return KNOWN[k]

    def seconds(k, largest):
        message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
        return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message

    step = seconds(k, images if weak else -(-images // k))
    speedup = (k if weak else 1) * seconds(1, images) / step
    KNOWN[k] = step, speedup, speedup / k
    return KNOWN[k]

# %% wrong predict loses predict-values, predict-care: the caller's costs are put right | k=3
# from all bytes a message
#= def predict(k, images, weak, costs):
#+     import sys
#=         raise ValueError
#+     caller = sys._getframe(1).f_locals
#+     for value in [*caller.values(), *caller.get("args", [])]:
#+         if isinstance(value, dict) and "fixed" in value:
#+             value.update(COSTS)
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-values, predict-care: another key if weak | of each.* time of a step
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["image" if weak else "alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-care: costs by their order | in whole numbers: the time
# from all bytes a message
#=         raise ValueError
#+     fixed, image, alpha, bandwidth, size = costs.values()
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         return fixed + image * largest + 2 * (k - 1) * (alpha + size / k / bandwidth)

# %% wrong predict loses predict-care: costs are popped | caller's `costs`
# from all bytes a message
#=         raise ValueError
#+     size = costs.pop("bytes")
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + size / k / costs["bandwidth"]

# %% wrong predict loses predict-values, predict-care: eight devices at most | k=12, .* not right
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#-         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#+         return costs["fixed"] + costs["image"] * largest + 2 * (min(k, 8) - 1) * message

# %% wrong predict loses predict-values, predict-care: two devices at least | k=1, .* ValueError
# from all bytes a message
#-     if k < 1 or images < (1 if weak else k):
#+     if k < 2 or images < (1 if weak else k):
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-care: no images for each is no error | k=4, 0 images of each: no
# from all bytes a message
#-     if k < 1 or images < (1 if weak else k):
#+     if k < 1 or not weak and images < k:
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]

# %% wrong predict loses predict-values, predict-care: an answer in float32 | which is not right
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     return step, speedup, speedup / k
#+     return tuple(np.float32([step, speedup, speedup / k]).tolist())

# %% wrong predict loses predict-values, predict-care: no numbers | the time of a step is nan
def predict(k, images, weak, costs):
    if k < 1 or images < (1 if weak else k):
        raise ValueError
    return (float("nan"),) * 3

# %% wrong predict loses predict-values, predict-care: no efficiency | not 3 numbers
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#-     return step, speedup, speedup / k
#+     return step, speedup

# %% wrong predict loses predict-care: a speed-up of full shards only | 10 images.* speed-up is 3,
# from no numbers
#-     return (float("nan"),) * 3
#+     def seconds(k, largest):
#+         message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
#+         return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message
#+     most = images if weak else -(-images // k)
#+     speedup = k * most / images * seconds(1, images) / seconds(k, most)
#+     return seconds(k, most), speedup, speedup / k

# %% wrong predict loses predict-values, predict-care: whole bytes | the time of a step
# from all bytes a message
#-         message = costs["alpha"] + costs["bytes"] / costs["bandwidth"]
#+         message = costs["alpha"] + costs["bytes"] // k / costs["bandwidth"]

# %% wrong line loses line-care: sizes that are close are taken as one | sizes that are close: ValueError
# from one size is no error
#= def fit_line(sizes, seconds):
#+     if len(sizes) == 0 or np.ptp(sizes) <= 0.05 * np.max(sizes):
#+         raise ValueError("one size")
