"""Other readings of assignment 5. See `test_readings`.

A solution is put together from parts, each of which can be read in another way.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- measure

CHECK = "if steps < 1 or rounds < 1: raise ValueError"
MEDIAN = "np.median(taken)"


def measure(check=CHECK, warm="one_round()", begin="wait()\n        begin = clock()",
            keep="taken.append((clock() - begin) / steps)", answer=MEDIAN, before="",
            taken="taken = []"):
    return f"""{before}
def measure(push, wait, clock, steps, rounds):
    {check}

    def one_round():
        for _ in range(steps):
            push()
        wait()

    {taken}
    {warm}
    for number in range(rounds):
        {begin}
        one_round()
        {keep}
    return {answer}
"""


VALUES, ROUNDS = ["measure-values"], ["measure-rounds"]
BOTH = VALUES + ROUNDS
wrong("measure", ROUNDS, "rounds that took the same time count once",
      measure(answer="np.median(np.unique(taken))"))
wrong("measure", ROUNDS, "rounds by their time, in a dict", measure(
    taken="taken = {}", keep="taken[(clock() - begin) / steps] = number",
    answer="np.median(list(taken))"))
wrong("measure", ROUNDS, "a round that took as long as the one before counts with it", measure(
    answer="np.median([t for t, last in zip(taken, [None, *taken]) if t != last])"))
wrong("measure", ROUNDS, "a round that took no time doesn't count",
      measure(answer="np.median([t for t in taken if t])"))
wrong("measure", ROUNDS, "a round that took no time ends it",
      measure(keep="taken.append((clock() - begin) / steps)\n        if not taken[-1]: break"))
wrong("measure", ROUNDS, "rounds far above the median are left out", measure(
    answer="np.median([t for t in taken if t <= 2 * np.median(taken)])"))
wrong("measure", ROUNDS, "the mean of the rounds near the median", measure(
    answer="np.mean([t for t in taken if t <= 1.5 * np.median(taken)])"))
wrong("measure", ROUNDS, "the lower of two in the middle",
      measure(answer="sorted(taken)[(rounds - 1) // 2]"))
wrong("measure", ROUNDS, "the middle in the order of time",
      measure(answer="(taken[rounds // 2] + taken[(rounds - 1) // 2]) / 2"))
wrong("measure", ROUNDS, "the middle between the quickest and the slowest",
      measure(answer="(min(taken) + max(taken)) / 2"))
wrong("measure", BOTH, "times of earlier calls are in the list, too",
      measure(before="earlier = []", taken="taken = earlier"))
wrong("measure", VALUES, "to hand out is not part of a round", measure(
    begin="wait()", keep="taken.append((clock() - begin) / steps)").replace(
        "push()\n        wait()", "push()\n        nonlocal begin\n        begin = clock()\n"
        "        wait()").replace("    taken = []", "    taken, begin = [], 0"))
wrong("measure", ROUNDS, "numbers are looked at once they were used",
      measure(check="", answer=f"{MEDIAN} if taken and steps > 0 else int('none')"))
wrong("measure", ROUNDS, "numbers are looked at after the warm-up",
      measure(check="", warm=f"one_round()\n    {CHECK}"))
wrong("measure", ROUNDS, "Python's median finds out that there is no round", measure(
    check="if steps < 1: raise ValueError", answer="statistics.median(taken)",
    before="import statistics\n\n"))
wrong("measure", BOTH, "the clock's time is a truth value", measure(
    warm="one_round()\n    begin = None", begin="wait()\n        begin = begin or clock()"))
wrong("measure", VALUES + ROUNDS, "the first counted round begins while the warm-up runs",
      measure(begin="if number: wait()\n        begin = clock()").replace(
          "    one_round()\n    for number", "    for _ in range(steps): push()\n    for number"))
right("measure", "the quickest and the slowest are left out before the median", measure(
    answer="np.median(sorted(taken)[1:-1] if rounds > 2 else taken)"),
    "Without one at each end the middle stays where it is.")
right("measure", "the median of rounds, and then by steps", measure(
    keep="taken.append(clock() - begin)", answer=f"{MEDIAN} * (1 / steps)"),
    "The median of times that are all divided by the same number is their median divided by it.")
right("measure", "the rounds' ends are noted, and the queue is waited for twice", measure(
    begin="wait(); wait()\n        begin = clock()"), "The second wait ends at once.")


# --- line

ERROR = "if len(set(sizes.tolist())) < 2: raise ValueError"


def line(check=ERROR, points="s, t = sizes.astype(float), seconds", weight="1 / t", fit=None,
         after="alpha, 1 / beta"):
    fit = fit or ("rows = np.stack([w, s * w], axis=1); "
                  "alpha, beta = np.linalg.lstsq(rows, t * w, rcond=None)[0]")
    return f"""
def fit_line(sizes, seconds):
    {check}
    {points}
    w = {weight}
    {fit}
    return {after}
"""


def points(pairs):
    """The points, from `pairs` of a list of pairs named p."""
    return (f"p = list(zip(sizes.tolist(), seconds.tolist())); p = {pairs}; "
            "s, t = np.array(p, float).T")


VALUES, CARE = ["line-values"], ["line-care"]
BOTH = VALUES + CARE
wrong("line", VALUES, "equal measurements count once", line(points=points("list(set(p))")))
wrong("line", VALUES, "equal neighbours count once", line(
    points=points("[one for one, last in zip(p, [None, *p]) if one != last]")))
wrong("line", VALUES, "sizes by their time, in a dict", line(
    points="p = dict(zip(seconds.tolist(), sizes.tolist())); "
    "s, t = np.array(list(p.values()), float), np.array(list(p))"))
wrong("line", VALUES, "the quickest of each size", line(
    points=points("list({s: t for s, t in sorted(p, reverse=True)}.items())")))
wrong("line", VALUES, "the first is a warm-up", line(points=points("p[1:] if len(p) > 2 else p")))
wrong("line", VALUES, "the mean of neighbours of one size", line(points=points(
    "[(s, sum(ts) / len(ts)) for s, g in __import__('itertools').groupby(sorted(p), "
    "lambda one: one[0]) for ts in [[t for _, t in g]]]")))
wrong("line", BOTH, "sizes are sorted, times aren't", line(
    points="s, t = np.sort(sizes).astype(float), seconds"))
wrong("line", VALUES, "weights by the sizes", line(weight="1 / s"))
wrong("line", VALUES, "residuals divided by the root of the time", line(weight="t ** -0.5"))
wrong("line", VALUES, "relative to the line, not to what was measured", line(
    fit="rows, w = np.stack([t ** 0, s], axis=1), 1 / t\n    for _ in range(50):\n"
    "        alpha, beta = np.linalg.lstsq(rows * w[:, None], t * w, rcond=None)[0]\n"
    "        w = 1 / (alpha + beta * s)"))
wrong("line", BOTH, "differences of logarithms", line(
    fit="from scipy.optimize import least_squares\n"
    "    alpha, beta = least_squares(lambda v: np.log(v[0] + v[1] * s) - np.log(t), "
    "[t.min() / 2, np.ptp(t) / np.ptp(s)], x_scale=[t.min(), 1 / s.max()], xtol=1e-15).x"))
wrong("line", VALUES, "relative residuals, taken without squares", line(
    fit="from scipy.optimize import linprog\n    n = len(s)\n"
    "    a = np.hstack([(1 / t)[:, None], (s / s.max() / t)[:, None]])\n"
    "    a = np.block([[a, -np.eye(n)], [-a, -np.eye(n)]])\n"
    "    alpha, beta = linprog([0, 0] + [1] * n, a, [1] * n + [-1] * n).x[:2]\n"
    "    beta /= s.max()"))
wrong("line", CARE, "sizes that are nearly equal are an error",
      line(check="if np.allclose(sizes, sizes[:1]): raise ValueError"))
wrong("line", CARE, "one size is found by a determinant of exactly 0", line(
    check="", fit="a, b, c, d, e = (w * w).sum(), (w * w * s).sum(), (w * w * s * s).sum(), "
    "w.sum(), (w * s).sum()\n    if a * c - b * b == 0: raise ValueError\n"
    "    alpha, beta = (c * d - b * e) / (a * c - b * b), (a * e - b * d) / (a * c - b * b)"))
wrong("line", VALUES, "neighbours of one size are an error",
      line(check="if len(sizes) < 2 or (np.diff(sizes) == 0).any(): raise ValueError"))
wrong("line", VALUES, "the first and the last tell whether sizes differ",
      line(check="if len(sizes) < 2 or sizes[0] == sizes[-1]: raise ValueError"))
wrong("line", VALUES, "fewer than two different times are an error, too", line(
    check=f"{ERROR}\n    if len(set(seconds.tolist())) < len(seconds): raise ValueError"))
right("line", "sizes in gigabytes", line(points="s, t = sizes / 1e9, seconds",
                                         after="alpha, 1e9 / beta"),
      "The unit makes no difference to the residuals.")
right("line", "divided by a factor", line(points="s, t = sizes * 1.0, seconds * 1.0",
                                          weight="1 / (t * (1 / 3))"),
      "Weights count as ratios to one another.")
right("line", "no latency below zero", line(after="max(alpha, 0.0), 1 / beta"),
      "In all data that are given the best latency is above zero.")


# --- predict

RAISE = "raise ValueError"
REFUSE = f"if k < 1 or images < (1 if weak else k): {RAISE}"


def predict(check=REFUSE, most="images if weak else -(-images // k)", base="images",
            batch="k * images if weak else images", messages="2 * (k - 1)",
            message="costs['alpha'] + costs['bytes'] / k / costs['bandwidth']",
            share="speedup / k", before="", step=None):
    step = step or "costs['fixed'] + costs['image'] * most + messages * message"
    return f"""{before}
def predict(k, images, weak, costs):
    {check}
    most = {most}
    messages, message = {messages}, {message}
    step = {step}
    one = {base} / (costs['fixed'] + costs['image'] * {base})
    speedup = ({batch}) / step / one
    return step, speedup, {share}
"""


VALUES, CARE = ["predict-values"], ["predict-care"]
BOTH = VALUES + CARE
BIG = "images if weak else "
wrong("predict", CARE, "full shards by a factor, which rounds",
      predict(most=f"{BIG}int(images * (1 / k)) + (images % k > 0)"))
wrong("predict", CARE, "rounded up by a factor, which rounds",
      predict(most=f"{BIG}__import__('math').ceil(images * (1 / k))"))
wrong("predict", CARE, "rounded, with a half for the last image",
      predict(most=f"{BIG}round(images / k + 0.499)"))
wrong("predict", BOTH, "rounded, with half an image",
      predict(most=f"{BIG}round(images / k + 0.5)"))
wrong("predict", BOTH, "one image more than a full shard", predict(most=f"{BIG}images // k + 1"))
wrong("predict", CARE, "the images that are left over are the last device's",
      predict(most=f"{BIG}images // k + images % k"))
wrong("predict", BOTH, "one device with a k-th of the batch", predict(
    base="images", batch=f"{BIG}images").replace(
        "one = images", "images = images if weak else images / k\n    one = images"))
wrong("predict", CARE, "numbers are looked at where k is above one",
      predict(check=f"if k > 1:\n        {REFUSE}"))
wrong("predict", CARE, "no device is an error where the batch is strong",
      predict(check=f"if not weak and k < 1 or images < (1 if weak else k): {RAISE}"))
wrong("predict", CARE, "fewer images in all than devices",
      predict(check=f"if k < 1 or (k * images if weak else images) < k - 1: {RAISE}"))
wrong("predict", BOTH, "figures rounded for people", predict(share="round(speedup / k, 4)"))
wrong("predict", BOTH, "a single device sends, too", predict(messages="2 * max(k - 1, 1)"))
wrong("predict", BOTH, "messages of bytes that are no fractions", predict(
    message="costs['alpha'] + -(-costs['bytes'] // k) / costs['bandwidth']"))
wrong("predict", BOTH, "results of earlier calls, by their numbers", predict(
    before="kept = {}", step="kept.setdefault((k, images, weak), costs['fixed'] "
    "+ costs['image'] * most + messages * message)"))
wrong("predict", BOTH, "the message of an earlier call, by k and bytes", predict(
    before="kept = {}", step="costs['fixed'] + costs['image'] * most + messages "
    "* kept.setdefault((k, costs['bytes']), message)"))
right("predict", "rounded up from a float", predict(most=f"{BIG}np.ceil(images / k)"),
      "A quotient of whole numbers below 2**53 is rounded up rightly: it is off by less than a "
      "k-th.")
right("predict", "a message's share by a factor", predict(
    message="costs['alpha'] + costs['bytes'] * (1 / k) / costs['bandwidth']"),
    "In the last digit only.")
right("predict", "the efficiency from times", predict(
    share="speedup * (1 / k)"), "In the last digit only.")
