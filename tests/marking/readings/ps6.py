"""Other readings of assignment 6. See `test_readings`.

A solution is put together from parts, each of which can be read in another way.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- cut

RAISE = "raise ValueError"
BAD = "not all(0 < v < float('inf') for v in speeds)"
REFUSE = f"if n < len(speeds) or {BAD}: {RAISE}"


def cut(check=REFUSE, again="while True:", rest="n - len(speeds) + len(sharing)", key="got - due",
        place="i", few="sizes[i] == 0", which="few", down="int({})",
        share="rest * speeds[i] / total", after=""):
    """again: how often shares are taken. rest: examples of those who share. key, place: in which
    order the examples that are left over go out. few, which: who has nothing, and who of those is
    done with one."""
    down = down.format("due[i]")
    return f"""
def cut(n, speeds):
    {check}
    sizes, sharing = [1] * len(speeds), list(range(len(speeds)))
    {again}
        rest, total = {rest}, sum(speeds[i] for i in sharing)
        due = {{i: {share} for i in sharing}}
        first = {{i: {down} for i in sharing}}
        over = rest - sum(first.values())

        def key(i, due=due, first=first):
            due, got, speed = due[i], first[i], speeds[i]
            return {key}, {place}

        for i in sharing:
            sizes[i] = first[i]
        for i in sorted(sharing, key=key)[:over]:
            sizes[i] += 1
        few = [i for i in sharing if {few}]
        done = {which}
        for i in few:
            sizes[i] = max(sizes[i], 1)
        if not done:
            break
        sharing = [i for i in sharing if i not in done]
    {after}
    return sizes
"""


VALUES, FEW, CARE = ["cut-values"], ["cut-few"], ["cut-care"]
ALL = VALUES + FEW + CARE
for times in (2, 4, 6, 10):
    wrong("cut", FEW, f"the others share {times} times at most",
          cut(again=f"for _ in range({times}):"))
wrong("cut", FEW, "the others share as often as half of the devices",
      cut(again="for _ in range(1 + len(speeds) // 2):"))
wrong("cut", FEW, "who has nothing before the rest goes out is done with one",
      cut(few="first[i] == 0"))
wrong("cut", FEW, "who is due less than one is done with one", cut(few="due[i] < 1"))
wrong("cut", FEW, "one device after the other is done, the lowest number first",
      cut(which="few[:1]"))
wrong("cut", FEW, "one device after the other is done, the highest number first",
      cut(which="few[-1:]"))
wrong("cut", FEW, "one device after the other is done, the slowest first",
      cut(which="sorted(few, key=lambda i: speeds[i])[:1]"))
wrong("cut", FEW, "one device after the other is done, the fastest first",
      cut(which="sorted(few, key=lambda i: -speeds[i])[:1]"))
wrong("cut", FEW, "who has nothing takes one from the largest, until nobody has nothing", cut(
    again="for _ in range(1):", which="[]", after="for _ in range(sum(sizes) - n): "
    "sizes[sizes.index(max(sizes))] -= 1"))
wrong("cut", FEW, "who has nothing takes one from the last of the largest", cut(
    again="for _ in range(1):", which="[]", after="for _ in range(sum(sizes) - n): "
    "sizes[-1 - sizes[::-1].index(max(sizes))] -= 1"))
wrong("cut", VALUES + FEW, "of equal remainders the higher number first", cut(place="-i"))
wrong("cut", FEW, "of equal remainders the higher number first, where others are done",
      cut(place="i if len(sharing) == len(speeds) else -i"))
wrong("cut", VALUES, "of equal remainders the higher number first, where nobody is done",
      cut(place="-i if len(sharing) == len(speeds) else i"))
wrong("cut", VALUES + FEW, "of equal remainders the slower device first",
      cut(place="speed, i"))
wrong("cut", VALUES + FEW, "of equal remainders the one who has less first", cut(place="got, i"))
wrong("cut", VALUES + FEW, "to those who lost the largest part by rounding",
      cut(key="(got - due) / due"))
wrong("cut", VALUES + FEW, "to those who lost most by rounding, in seconds",
      cut(key="(got - due) / speed"))
wrong("cut", VALUES + FEW, "to those whose remainder is a half or more, then by number",
      cut(key="due - got < 0.5"))
for digits in (2, 4, 6):
    wrong("cut", VALUES, f"remainders to {digits} digits", cut(key=f"round(got - due, {digits})"))
wrong("cut", VALUES + FEW, "rounded up, and taken back from the smallest remainders",
      cut(down="-int(-{} // 1)", key="due - got").replace(
          "[:over]:", "[:-over or None]:").replace("sizes[i] += 1", "sizes[i] -= over < 0"))
wrong("cut", CARE, "speeds are looked at unless each gets one", cut(
    f"if n < len(speeds): {RAISE}\n    if n == len(speeds): return [1] * n\n    if {BAD}: {RAISE}"))
wrong("cut", CARE, "speeds are looked at unless all are equal", cut(
    f"if n < len(speeds): {RAISE}\n    if len(set(speeds)) == 1: return [n // len(speeds) + "
    f"(i < n % len(speeds)) for i in range(len(speeds))]\n    if {BAD}: {RAISE}"))
wrong("cut", CARE, "speeds are looked at where there are two",
      cut(f"if n < len(speeds): {RAISE}\n    if len(speeds) == 1: return [n]\n"
          f"    if {BAD}: {RAISE}"))
wrong("cut", CARE, "the sum of the speeds is looked at, and their product", cut(
    f"if n < len(speeds) or not 0 < sum(speeds) < float('inf') or not 0 < "
    f"np.prod(np.float64(speeds)) : {RAISE}"))
wrong("cut", FEW + CARE, "fewer examples than devices, or as many",
      cut(f"if n <= len(speeds) or {BAD}: {RAISE}"))
wrong("cut", CARE, "sizes are written into the caller's list",
      cut(after="for i in range(len(speeds)): speeds[i] = sizes[i]\n    return speeds"))
right("cut", "as often as there are devices", cut(again="for _ in range(len(speeds)):"),
      "Each round but the last leaves out a device, and one alone has all that is left.")
right("cut", "a share by a factor", cut(share="rest * (speeds[i] / total)"),
      "In the last digits only: who is rounded down too far has the largest remainder.")
right("cut", "remainders to nine digits", cut(key="round(got - due, 9)"),
      "What differs less than that are a floating-point number's last digits.")
right("cut", "rounded up from below", cut(down="-int(-{} // 1) - (due[i] % 1 > 0)"),
      "That is rounding down.")


# --- average

SIZES = "if len(gradients) != len(sizes): raise ValueError"


def average(check=SIZES, used="[i for i, s in enumerate(sizes) if s]", weight="sizes[i] / n",
            g="gradients[i].asnumpy()", write="g[:] = total", to="gradients", last="",
            n="sum(sizes)"):
    return f"""
def average(gradients, sizes):
    {check}
    used, n = {used}, {n}
    total = sum({g} * ({weight}) for i in used)
    for g in {to}:
        {write}
    {last}
"""


VALUES, CARE = ["average-values"], ["average-care"]
BOTH = VALUES + CARE
wrong("average", BOTH, "adds to what lies there", average(
    write="g += mx.nd.array(total, g.context, dtype=g.dtype)"))
wrong("average", CARE, "what lies there is multiplied with zero first", average(
    write="g *= 0; g += mx.nd.array(total, g.context, dtype=g.dtype)"))
wrong("average", BOTH, "each is worked out when its turn comes", average(
    write="g[:] = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)"))
wrong("average", CARE, "lengths are looked at once all is written",
      average(check="", used="[i for i, (s, _) in enumerate(zip(sizes, gradients)) if s]",
              last=SIZES))
wrong("average", CARE, "lengths are looked at once each is weighted", average(
    check="for g, s in zip(gradients, sizes): g *= s\n    " + SIZES, weight="1 / n"))
wrong("average", CARE, "one device needs no sizes",
      average(check=f"if len(gradients) == 1: return\n    {SIZES}"))
wrong("average", CARE, "sizes that are equal need no weights", average(
    check="if len(set(sizes)) == 1:\n        sizes = [1] * len(gradients)\n    " + SIZES))
wrong("average", CARE, "more sizes than gradients are an error",
      average(check="if len(gradients) < len(sizes): raise ValueError",
              used="[i for i, s in enumerate(sizes) if s]"))
wrong("average", CARE, "more gradients than sizes are an error",
      average(check="if len(gradients) > len(sizes): raise ValueError",
              used="[i for i, s in enumerate(sizes[:len(gradients)]) if s]"))
wrong("average", CARE, "gradients that aren't finite don't count", average(
    used="[i for i, s in enumerate(sizes) if s and np.isfinite(gradients[i].asnumpy()).all()]"))
wrong("average", CARE, "NaN and infinity become numbers", average(
    used="range(len(sizes))", g="np.nan_to_num(gradients[i].asnumpy())"))
wrong("average", CARE, "nothing counts only from the second device on",
      average(used="[i for i, s in enumerate(sizes) if s or not i]"))
wrong("average", CARE, "nothing counts only on one device", average(
    used="[i for i, s in enumerate(sizes) if s or sizes.index(0) != i]"))
wrong("average", CARE, "only those with examples are written",
      average(to="[gradients[i] for i in used]"))
wrong("average", CARE, "through an mx.nd array", average(write="g[:] = mx.nd.array(total)"))
wrong("average", CARE, "a mean of those with examples where their sizes are nearly equal", average(
    weight="1 / len(used) if min(sizes) and max(sizes) / min(sizes) < 1.01 else sizes[i] / n"))
wrong("average", BOTH, "divided by the number of devices with examples",
      average(weight="1 / len(used)"))
wrong("average", CARE, "the sizes lose their zeros", average(
    used="[i for i, s in enumerate(list(sizes)) if s]", last="while 0 in sizes: sizes.remove(0)"))
right("average", "weights of the largest size", average(
    weight="(sizes[i] / max(sizes)) / (n / max(sizes))"), "In the last digits only.")
right("average", "equal sizes have equal weights", average(
    weight="1 / len(sizes) if len(set(sizes)) == 1 else sizes[i] / n"),
    "That is the weight that the formula gives.")
right("average", "the number of examples with Fractions", average(
    weight="float(__import__('fractions').Fraction(sizes[i], n))"), "Exact, and then rounded once.")


# --- time

def steps(alone="n / max(speeds)", equal="n / k / min(speeds)", together="n / sum(speeds)",
          cost="cost if k > 1 else 0", before=""):
    return f"""
def step_seconds(n, speeds, cost):
    {before}
    k = len(speeds)
    cost = {cost}
    return {alone}, {equal} + cost, {together} + cost
"""


def whom(order="sorted(range(k), key=lambda i: -speeds[i])", before="",
         search="best = min(range(k), key=lambda m: (times[m], m))",
         time="n / sum(speeds[i] for i in ranked[:m + 1]) + costs[m]",
         chosen="sorted(ranked[:best + 1])", seconds="times[best]"):
    return f"""

def whom(n, speeds, costs):
    {before}
    k = len(speeds)
    ranked = {order}
    times = [{time} for m in range(k)]
    {search}
    return {chosen}, {seconds}
"""


SECONDS, WHOM = ["time-seconds"], ["time-whom"]
BOTH = SECONDS + WHOM
FORWARD = """best, late = 0, 0
    for m in range(1, k):
        if times[m] < times[best]:
            best, late = m, 0
        elif (late := late + 1) == {}:
            break"""
for patience in (1, 2, 4):
    wrong("time", WHOM, f"stops when {patience} more don't pay",
          steps() + whom(search=FORWARD.format(patience)))
wrong("time", WHOM, "leaves out the slowest as long as that helps", steps() + whom(
    search="best = k - 1\n    while best and times[best - 1] <= times[best]: best -= 1"))
wrong("time", WHOM, "leaves out the slowest as long as that makes it faster", steps() + whom(
    search="best = k - 1\n    while best and times[best - 1] < times[best]: best -= 1"))
wrong("time", WHOM, "searches by thirds, as if there was one valley", steps() + whom(
    search="low, high = 0, k - 1\n    while low < high:\n        middle = (low + high) // 2\n"
    "        if times[middle] <= times[middle + 1]: high = middle\n"
    "        else: low = middle + 1\n    best = low"))
wrong("time", WHOM, "of equally fast choices the last", steps() + whom(
    search="best = min(range(k), key=lambda m: (times[m], -m))"))
wrong("time", WHOM, "of equally fast choices the last of those that follow each other", steps()
      + whom(search="best = times.index(min(times))\n"
             "    while best < k - 1 and times[best + 1] == times[best]: best += 1"))
wrong("time", WHOM, "of one speed the higher numbers", steps() + whom(
    order="sorted(range(k), key=lambda i: (-speeds[i], -i))"))
wrong("time", WHOM, "devices of one speed come together, or not at all", steps() + whom(
    search="best = min((m for m in range(k) if m == k - 1 or speeds[ranked[m]] != "
    "speeds[ranked[m + 1]]), key=lambda m: (times[m], m))"))
wrong("time", WHOM, "each speed counts once", steps() + whom(
    order="sorted({v: i for i, v in reversed(list(enumerate(speeds)))}.values(), "
    "key=lambda i: -speeds[i])").replace(
        "times = [", "k = len(ranked)\n    times = ["))
wrong("time", WHOM, "times to six digits", steps() + whom(
    search="best = min(range(k), key=lambda m: (round(times[m], 6), m))"))
wrong("time", WHOM, "costs never fall", steps() + whom(
    before="costs = [max(costs[:m + 1]) for m in range(len(costs))]"))
wrong("time", WHOM, "the seconds with the cost of all devices", steps()
      + whom(seconds="n / sum(speeds[i] for i in ranked[:best + 1]) + costs[-1]"))
wrong("time", WHOM, "chosen in an array of its own", steps() + whom(
    chosen="np.sort(ranked[:best + 1])"))
wrong("time", SECONDS, "all devices of one speed need no all-reduce", steps(
    cost="cost if len(set(speeds)) > 1 else 0") + whom())
wrong("time", SECONDS, "equal shares of whole examples where they fit",
      steps(equal="(n // k if n > 10 * k else n / k) / min(speeds)") + whom())
wrong("time", SECONDS, "the slowest is the last", steps(equal="n / k / speeds[-1]") + whom())
wrong("time", SECONDS, "in proportion, but whole examples",
      steps(together="-(-n // sum(speeds))") + whom())
wrong("time", WHOM, "the devices' speeds in order, for the next one who asks",
      steps(before="speeds.sort(reverse=True)", alone="n / speeds[0]") + whom())
right("time", "shares by a factor", steps(equal="n * (1 / k) / min(speeds)") + whom(),
      "In the last digit only.")
right("time", "stops where the cost alone is more than the best time", steps() + whom(
    search="best = 0\n    for m in range(1, k):\n"
    "        if costs[m] < times[best] and times[m] < times[best]: best = m"),
    "With such a cost no choice is faster: it passes over that number, and looks on.")
right("time", "of one speed by number, sorted twice", steps() + whom(
    order="sorted(sorted(range(k), reverse=True), key=lambda i: (-speeds[i], i))"),
    "The number decides, whatever the order before.")
