"""Other readings of assignment 2. See `test_readings`.

A tree is put together from its pairs, and what happens up and down; a ring from where chunks end,
and what happens in a step; the busiest device from what each scheme counts.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- tree

DOUBLING = "    pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]"


def tree(make=f"gap = 1\nwhile gap < k:\n{DOUBLING}\n    gap *= 2", before="",
         up="arrays[low] += send(arrays[high], arrays[low].context)",
         down="send(arrays[low], arrays[high])"):
    return f"""{before}
def tree_allreduce(arrays, send):
    k, pairs = len(arrays), []
    {make.replace(chr(10), chr(10) + "    ")}
    for low, high in pairs:
        {up}
    for low, high in reversed(pairs):
        {down}
"""


# Of the devices that are left each round makes groups, the first of which goes on. {group}
# says how, where their number is odd.
GROUPS = """left = list(range(k))
while len(left) > 1:
    groups = [left[i : i + 2] for i in range(0, len(left), 2)]
    if len(left) % 2:
        {odd}
    pairs += [(group[0], other) for group in groups for other in group[1:]]
    left = [group[0] for group in groups]"""

BOTH = ["tree-values", "tree-rounds"]
for rounds in (2, 3, 4, 5):
    wrong("tree", BOTH, f"{rounds} rounds up, whatever k is",
          tree(f"for gap in {[2**r for r in range(rounds)]}:\n{DOUBLING}"))
wrong("tree", BOTH, "as many rounds as k has halves, rounded down",
      tree(f"for gap in [2**r for r in range(int(np.log2(k)))]:\n{DOUBLING}"))
for what, odd in (("joins the first pair", "groups[0] += groups.pop()"),
                  ("goes first in the next round, after a message of its own",
                   "groups = [groups.pop() + groups[0], *groups[1:]]")):
    wrong("tree", ["tree-rounds"], f"the odd one out {what}", tree(GROUPS.format(odd=odd)))
wrong("tree", ["tree-rounds"], "threes in place of pairs", tree(
    GROUPS.replace("i + 2", "i + 3").replace("len(left), 2", "len(left), 3")
    .format(odd="pass")))
wrong("tree", ["tree-rounds"], "an array of zeros is not sent", tree(
    up="if arrays[high].asnumpy().any():\n"
    "            arrays[low] += send(arrays[high], arrays[low].context)"))
wrong("tree", ["tree-rounds"], "nothing is sent down to whoever has it", tree(
    down="if (arrays[low].asnumpy() != arrays[high].asnumpy()).any():\n"
    "            send(arrays[low], arrays[high])"))
wrong("tree", ["tree-values"], "down by adding what is missing",
      tree(down="arrays[high] += send(arrays[low], arrays[high].context) - arrays[high]"))
wrong("tree", ["tree-values"], "down onto what is made zero by a product", tree(
    down="arrays[high] *= 0; arrays[high] += send(arrays[low], arrays[high].context)"))
wrong("tree", BOTH, "arrives in memory kept by shape, of the first call's type", tree(
    before="kept = {}", up="key = arrays[low].shape, arrays[low].context; send(arrays[high], "
    "kept.setdefault(key, mx.nd.empty(*key, arrays[low].dtype))); arrays[low] += kept[key]"))
right("tree", "the odd one out joins the last pair", tree(
    GROUPS.format(odd="last = groups.pop(); groups[-1] += last")),
    "It takes one round more, in the last group only, which never makes the whole take more: "
    "tried for every k below 3000.")
right("tree", "six rounds up, whatever k is",
      tree(f"for gap in {[2**r for r in range(6)]}:\n{DOUBLING}"),
      "It is right up to 64 devices, and there can be no more.")
right("tree", "the largest gap first", tree(
    "for gap in [2**r for r in range((k - 1).bit_length())][::-1]:\n"
    "    pairs += [(i, i + gap) for i in range(min(gap, k - gap))]; k = min(k, gap)"),
    "Another tree of as few rounds: the text leaves open who is whose partner.")
right("tree", "until no pair is left", tree(
    f"gap, n = 1, -1\nwhile n < len(pairs):\n    n = len(pairs)\n{DOUBLING}\n    gap *= 2"),
    "There is a pair as long as the gap is below k.")
right("tree", "arrives in memory that holds other numbers", tree(
    up="room = arrays[low] * 0 + 7; send(arrays[high], room); arrays[low] += room"),
    "`send` overwrites what is there.")
right("tree", "down onto what is made zero by writing", tree(
    down="arrays[high][:] = 0; arrays[high] += send(arrays[low], arrays[high].context)"),
    "Zero and the sum are the sum.")
right("tree", "sums in float64", tree(
    up="both = [a.astype('float64') for a in (arrays[low], send(arrays[high], "
    "arrays[low].context))]; arrays[low][:] = (both[0] + both[1]).astype(arrays[low].dtype)"),
    "The sum of two numbers of float32 comes to the same, rounded once.")


# --- ring

def ring(ends="[n * c // k for c in range(k + 1)]", steps="2 * k - 2", half="step < k - 1",
         chunk="(i - step) % k", sent="ends[c] < ends[c + 1]", before="",
         add="there += send(here, there.context)", hand="send(here, there)"):
    return f"""{before}
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    flat = [a.reshape(-1) for a in arrays]
    ends = {ends}
    for step in range({steps}):
        for i in range(k):
            c, j = {chunk}, (i + 1) % k
            here, there = (flat[r][ends[c] : ends[c + 1]] if ends[c] < ends[c + 1] else None
                           for r in (i, j))
            if {sent}:
                if {half}:
                    {add}
                else:
                    {hand}
"""


BOTH = ["ring-values", "ring-bytes"]
LENGTHS = "[sum(lengths[:c]) for c in range(k + 1)]"
for what, loses, ends in (
        ("by a share of all, which rounds", ["ring-bytes"],
         "[int(n * (c * (1 / k))) for c in range(k + 1)]"),
        ("by a length that isn't whole, which rounds", ["ring-values"],
         "[int(c * (n / k)) for c in range(k + 1)]"),
        ("lengths rounded down, the rest in the last", ["ring-bytes"],
         "[c * (n // k) for c in range(k)] + [n]"),
        ("lengths rounded to the nearest, the rest in the last", BOTH,
         "[c * round(n / k) for c in range(k)] + [n]"),
        ("lengths rounded down, the rest in the first", ["ring-bytes"],
         "[0] + [n - (k - c) * (n // k) for c in range(1, k + 1)]"),
        ("longer ones by a fraction, rounded down", ["ring-values"],
         "[c * (n // k) + min(c, int((n / k - n // k) * k)) for c in range(k + 1)]")):
    wrong("ring", loses, f"ends {what}", ring(ends=ends))
for most in (8, 16):
    wrong("ring", BOTH, f"{most} devices at most have their turns",
          ring(steps=f"2 * min(k, {most}) - 2", half=f"step < min(k, {most}) - 1"))
wrong("ring", ["ring-bytes"], "a chunk of zeros is not sent",
      ring(sent="here is not None and (step >= k - 1 or here.asnumpy().any())"))
wrong("ring", ["ring-bytes"], "no chunk is sent to whoever has it", ring(
    sent="here is not None and (step < k - 1 or (here.asnumpy() != there.asnumpy()).any())"))
wrong("ring", ["ring-values"], "overwritten by adding what is missing",
      ring(hand="there += send(here, there.context) - there"))
wrong("ring", ["ring-values"], "overwritten after a product with zero",
      ring(hand="there *= 0; there += send(here, there.context)"))
wrong("ring", BOTH, "one step more adds", ring(half="step < k"))
wrong("ring", BOTH, "one step less adds", ring(half="step < k - 2"))
wrong("ring", BOTH, "arrives in memory kept by length, of the first call's type", ring(
    before="kept = {}", add="key = there.shape, there.context; send(here, kept.setdefault(key, "
    "mx.nd.empty(*key, there.dtype))); there += kept[key]"))
wrong("ring", BOTH, "ends of an earlier call with as many devices",
      ring(before="kept = {}", ends="kept.setdefault(k, [n * c // k for c in range(k + 1)])"))
for first in (1, 2, -1):
    right("ring", f"starts with chunk i + {first}", ring(chunk=f"(i - step + {first}) % k"),
          "Who sends which chunk first is left open.")
for what, ends in (
        ("rounded up", "[-(-n * c // k) for c in range(k + 1)]"),
        ("rounded to the nearest", "[round(n * c / k) for c in range(k + 1)]"),
        ("longer ones last",
         "[c * (n // k) + max(0, c - k + n % k) for c in range(k + 1)]")):
    right("ring", f"ends {what}", ring(ends=ends), "Lengths differ by one at most.")
right("ring", "ends by a factor, which rounds",
      ring(ends="[int(n * c * (1 / k)) for c in range(k + 1)]"),
      "Exact for every k below 49; a ring of 49 sends more than there is time for.")
right("ring", "every k-th entry is a chunk", """
def ring_allreduce(arrays, send):
    k, n, shape = len(arrays), arrays[0].size, arrays[0].shape
    chunks = [[a.reshape(-1)[c::k].copy() if c < n else None for c in range(k)] for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if c < n:
                come = send(chunks[i][c], arrays[j].context)
                chunks[j][c] = chunks[j][c] + come if step < k - 1 else come
    for a, parts in zip(arrays, chunks):
        for c in range(min(k, n)):
            a.reshape(-1)[c::k] = parts[c]
""", "Chunks of entries: the text doesn't say that they lie side by side.")


# --- busiest

def busiest(first="(k - 1) * size", tree="(k - 1).bit_length() * size",
            ring="2 * (k - 1) * (size // k)", check="scheme not in ('first', 'tree', 'ring')",
            before="", after=""):
    return f"""
def busiest(scheme, k, size):
    {before}
    if {check}:
        raise ValueError(scheme)
    {after}
    if scheme == "first":
        return {first}
    return {tree} if scheme == "tree" else {ring}
"""


BOTH = ["busiest-values", "busiest-care"]
for what, loses, parts in (
        ("a chunk by a factor, which rounds", ["busiest-care"],
         dict(ring="2 * (k - 1) * int(size * (1 / k))")),
        ("a share of all by a factor, rounded down", ["busiest-care"],
         dict(ring="int(size * (2 * (k - 1) * (1 / k)))")),
        ("ten rounds at most", ["busiest-care"],
         dict(tree="sum(2**r < k for r in range(10)) * size")),
        ("one device sends, whatever the scheme", ["busiest-care"],
         dict(before="if k == 1: return size")),
        ("two devices, whatever the scheme", ["busiest-care"],
         dict(before="if k == 2: return size")),
        ("schemes in a text of all schemes", ["busiest-care"],
         dict(check="scheme not in 'first tree ring'")),
        ("spaces and large letters", ["busiest-care"],
         dict(check="scheme.strip().lower() not in ('first', 'tree', 'ring')")),
        ("sends and receives", BOTH, dict(tree="2 * (k - 1).bit_length() * size")),
        ("the ring counts k chunks a half", BOTH, dict(ring="2 * size")),
        ("the star sends up, too", BOTH, dict(first="k * size"))):
    wrong("busiest", loses, what, busiest(**parts))
for what, why, parts in (
        ("rounds by the logarithm's quotient",
         "It is right for every k below a million.",
         dict(before="import math", tree="math.ceil(math.log(k) / math.log(2)) * size")),
        ("one device sends nothing, once the scheme is known", "It has nobody to send to.",
         dict(after="if k == 1: return 0")),
        ("a share of all by a float, rounded down",
         "Exact where `size` is a multiple of k, for all k below 120 and size below 300 k.",
         dict(ring="int(2 * (k - 1) / k * size)")),
        ("what is left by a float, rounded down",
         "Exact where `size` is a multiple of k, for all k below 120 and size below 300 k.",
         dict(ring="int(2 * size * (1 - 1 / k))")),
        ("a chunk rounded up", "`size` is a multiple of k.",
         dict(ring="2 * (k - 1) * -(-size // k)")),
        ("all in one fraction", "It divides whole numbers, with nothing left over.",
         dict(ring="2 * (k - 1) * size // k"))):
    right("busiest", what, busiest(**parts), why)
