"""Other readings of assignment 1. See `test_readings`.

A solution is put together from a check, where shards end, and how a shard gets to its device.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


def split(name, check, ends, shard="batch[a:b].copyto(d)", before="", after="shards"):
    return f"""{before}
def {name}(batch, devices):
    n, k = len(batch), len(devices)
    {check}
    ends = {ends}
    shards = [{shard} for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
    return {after}
"""


# Kept from call to call: shards, or the memory in which they lie.
REMEMBERED = dict(before="kept = {}", after=(
    "[s.copy() for s in kept.setdefault((batch.shape, str(batch.dtype), str(devices)), shards)]"))
ONE_BUFFER = dict(before="kept = {}", shard=(
    "batch[a:b].copyto(kept.setdefault((b - a, batch.shape, str(batch.dtype), d),"
    " mx.nd.empty(batch[a:b].shape, d, batch.dtype)))"))
SAME_MEMORY = dict(shard="batch.copyto(d)[a:b]")


# --- even

CHECK, ENDS = "if n % k: raise ValueError", "[i * (n // k) for i in range(k + 1)]"


def even(check=CHECK, ends=ENDS, **parts):
    return split("split_even", check, ends, **parts)


for what, check in (
        ("only too few examples are an error", "if n < k: raise ValueError"),
        ("numbers are counted, not examples", "if batch.size % k: raise ValueError"),
        ("divisible either way", "if n % k and k % n: raise ValueError"),
        ("more than one example is left over", "if n % k > 1: raise ValueError"),
        ("looked at only where examples suffice", "if n >= k and n % k: raise ValueError"),
        ("looked at for two devices only", "if k == 2 and n % k: raise ValueError")):
    wrong("even", ["even-care"], what, even(check=check))
wrong("even", ["even-values", "even-care"], "evenly: an even number of examples",
      even(check="if n % 2 and k > 1: raise ValueError"))
wrong("even", ["even-values"], "the share by a factor, which rounds",
      even(check="if n * (1 / k) % 1: raise ValueError"))
wrong("even", ["even-values"], "a shard's size by a factor, which rounds",
      even(ends="[i * int(n * (1 / k)) for i in range(k + 1)]"))
wrong("even", ["even-care"], "shards of an earlier batch like this one", even(**REMEMBERED))
wrong("even", ["even-care"], "shards in memory that an earlier call has returned",
      even(**ONE_BUFFER))
wrong("even", ["even-values", "even-care"], "the first shard on the device of the lowest number",
      even(ends=f"{ENDS}; devices = sorted(devices, key=str)"))
right("even", "a device's place by `index`", even(
    shard="batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d)"),
    "No device is named twice.")
right("even", "each device gets a copy of the batch, and keeps a window onto it",
      even(**SAME_MEMORY), "Nobody else holds that copy: to write into it changes no other shard.")
right("even", "windows onto one copy of the batch", even(
    check=f"{CHECK}\n    whole = batch.copy()", shard="whole[a:b].as_in_context(d)"),
    "Windows that don't overlap: to write into one changes no other shard, nor the batch.")
right("even", "the size as a float", even(ends="[int(i * (n / k)) for i in range(k + 1)]"),
      "n / k is exact where k divides n.")


# --- uneven

FEW = "if n < k: raise ValueError"
LENGTHS = "[i * (n // k) + min(i, n % k) for i in range(k + 1)]"
SUMS = "[sum(lengths[:i]) for i in range(k + 1)]"


def uneven(check=FEW, ends=LENGTHS, **parts):
    return split("split_uneven", check, ends, **parts)


def lengths(expression):
    """Shard i has as many examples as `expression` says."""
    return uneven(f"{FEW}\n    lengths = [{expression} for i in range(k)]", SUMS)


VALUES, BOTH = ["uneven-values"], ["uneven-values", "uneven-care"]
for what, loses, ends in (
        ("ends rounded up", VALUES, "[-(-i * n // k) for i in range(k + 1)]"),
        ("ends rounded to the nearest", BOTH, "[round(i * n / k) for i in range(k + 1)]"),
        ("ends half up", BOTH, "[int(i * n / k + 0.5) for i in range(k + 1)]"),
        ("the longer shard first, and one only", BOTH,
         "[0] + [n - (k - i) * (n // k) for i in range(1, k + 1)]"),
        ("ends evenly spaced in floats", BOTH, "np.linspace(0, n, k + 1).astype(int).tolist()")):
    wrong("uneven", loses, what, uneven(ends=ends))
for what, loses, expression in (
        ("the share by a factor, which rounds", ["uneven-care"], "int(n * (1 / k)) + (i < n % k)"),
        ("what is left over as a fraction, rounded down", VALUES,
         "n // k + (i < int((n / k - n // k) * k))")):
    wrong("uneven", loses, what, lengths(expression))
wrong("uneven", VALUES, "as many examples as devices are too few",
      uneven(check="if n <= k: raise ValueError"))
wrong("uneven", BOTH, "what is left, divided and rounded to the nearest", split(
    "split_uneven", f"{FEW}\n    rest, ends = n, [0]\n    for left in range(k, 0, -1):\n"
    "        rest -= round(rest / left)\n        ends.append(n - rest)", "ends"))
wrong("uneven", ["uneven-care"], "too few only where there is none",
      uneven(check="if not n: raise ValueError", shard="mx.nd.array(batch.asnumpy()[a:b], d, "
             "batch.dtype)"))
wrong("uneven", ["uneven-care"], "looked at where they don't come out even, and half are there",
      uneven(check="if n % k and 2 * n < k: raise ValueError", shard="mx.nd.array("
             "batch.asnumpy()[a:b] if b > a else batch.asnumpy()[:1], d, batch.dtype)"))
wrong("uneven", ["uneven-care"], "float16 becomes float32", uneven(
    shard="mx.nd.array(batch.asnumpy()[a:b], d, 'float32' if batch.dtype == np.float16 else "
    "batch.dtype)"))
wrong("uneven", ["uneven-care"], "shards of an earlier batch like this one", uneven(**REMEMBERED))
wrong("uneven", ["uneven-care"], "shards in memory that an earlier call has returned",
      uneven(**ONE_BUFFER))
right("uneven", "even batches first, without a look at how many there are", split(
    "split_uneven", "if n % k == 0: ends = [i * n // k for i in range(k + 1)]\n"
    "    elif n < k: raise ValueError\n    else: ends = " + LENGTHS, "ends"),
    "Fewer examples than devices, other than none, never come out even.")
right("uneven", "each device gets a copy of the batch, and keeps a window onto it",
      uneven(**SAME_MEMORY), "Nobody else holds that copy: to write into it changes no other.")


# --- pairs

PARTS = "np.array_split(order, len(devices))"
INDEX = "mx.nd.array(p, dtype='int32')"


def pairs(parts=PARTS, index=INDEX, before="", first="", x="images.take(index)",
          y="labels.take(index)", keep="{}.copyto(d)"):
    return f"""{before}
def split_pairs(images, labels, order, devices):
    {first}
    pairs = []
    for p, d in zip({parts}, devices):
        index = {index}
        pairs.append(({keep.format(x)}, {keep.format(y)}))
    return pairs
"""


BOTH = ["pairs-values", "pairs-care"]
for what, loses, index in (
        ("numbers in the images' type", ["pairs-care"], "mx.nd.array(p, dtype=images.dtype)"),
        ("numbers in the labels' type", ["pairs-care"], "mx.nd.array(p, dtype=labels.dtype)"),
        ("numbers in uint8", ["pairs-care"], "mx.nd.array(p, dtype='uint8')"),
        ("numbers in float16", ["pairs-care"], "mx.nd.array(p, dtype='float16')"),
        ("in each shard by number", BOTH, "mx.nd.array(np.sort(p), dtype='int32')")):
    wrong("pairs", loses, what, pairs(index=index))
for what, loses, order in (
        ("one named twice in a row comes once", BOTH,
         "order[np.append(True, order[1:] != order[:-1])]"),
        ("one named three times comes twice", BOTH,
         "np.array([e for i, e in enumerate(order) if list(order[:i]).count(e) < 2])"),
        ("one named twice comes where it is named last", BOTH,
         "np.array([e for i, e in enumerate(order) if e not in order[i + 1:]])"),
        ("numbers count from 1", BOTH, "order - 1"),
        ("order by device in turn", BOTH,
         "np.concatenate([order[i::len(devices)] for i in range(len(devices))])")):
    wrong("pairs", loses, what, pairs(PARTS.replace("order", order, 1)))
wrong("pairs", ["pairs-care"], "as many examples as devices are too few",
      pairs(first="if len(order) <= len(devices): raise ValueError"))
wrong("pairs", ["pairs-care"], "more examples named than there are is an error",
      pairs(first="if len(order) > 2 * len(images): raise ValueError"))
wrong("pairs", ["pairs-care"], "the label of the first image that looks like it", pairs(
    first="all_x = images.asnumpy()", y="mx.nd.array([labels.asnumpy()[[(one == all_x[e]).all() "
    "for one in all_x].index(True)] for e in p], dtype=labels.dtype)"))
wrong("pairs", ["pairs-care"], "the image of the first example with its label", pairs(
    first="all_y = labels.asnumpy().tolist()", x="images.take(mx.nd.array("
    "[all_y.index(all_y[e]) for e in p], dtype='int32'))"))
wrong("pairs", BOTH, "labels are the numbers of their examples",
      pairs(y="mx.nd.array(p, dtype=labels.dtype)"))
wrong("pairs", ["pairs-care"], "cut by a factor, which rounds", pairs(
    "[order[int(n * (i * (1 / k))) : int(n * ((i + 1) * (1 / k)))] for i in range(k)] "
    "if n % k == 0 else np.array_split(order, k)", first="n, k = len(order), len(devices)"))
wrong("pairs", ["pairs-care"], "the pairs of an earlier order like this one", pairs(
    before="kept = {}", parts="kept.setdefault((len(order), str(devices)), "
    "np.array_split(order.copy(), len(devices)))"))
wrong("pairs", ["pairs-care"], "pairs in memory that an earlier call has returned", pairs(
    before="kept = {}\n\n\ndef keep(a, i, d):\n"
    "    key = (i, a.shape, str(a.dtype), d)\n"
    "    return a.copyto(kept.setdefault(key, mx.nd.empty(a.shape, d, a.dtype)))\n\n",
    x="keep(images.take(index), 0, d)", y="keep(labels.take(index), 1, d)", keep="{}"))
right("pairs", "numbers past the end go round", pairs(
    x="images.take(index, mode='wrap')", y="labels.take(index, mode='wrap')"),
    "`order` names examples that there are, so none is past the end.")
right("pairs", "numbers in float32", pairs(index="mx.nd.array(p)"),
      "float32 holds every number below 2**24, and no batch is as long.")
right("pairs", "windows onto one copy in the new order", pairs(
    first="x, y = (a.take(mx.nd.array(order, dtype='int64')) for a in (images, labels)); end = 0",
    index="slice(end, end := end + len(p))", x="x[index]", y="y[index]",
    keep="{}.as_in_context(d)"),
    "Windows that don't overlap: to write into one changes no other, nor the caller's arrays.")
