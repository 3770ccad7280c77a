# %% right cut: whole numbers all the way, nothing rounded
def cut(n, speeds):
    from fractions import Fraction

    if n < len(speeds):
        raise ValueError("more devices than examples")
    for v in speeds:
        if not np.isfinite(v) or v <= 0:
            raise ValueError(f"a speed of {v}")

    def share(n, speeds):
        exact = [Fraction(v) for v in speeds]
        parts = [divmod(n * v, sum(exact)) for v in exact]
        sizes = [int(whole) for whole, _ in parts]
        first = sorted(range(len(parts)), key=lambda i: (-parts[i][1], i))
        for i in first[: n - sum(sizes)]:
            sizes[i] += 1
        if 0 not in sizes:
            return sizes
        rest = iter(share(n - sizes.count(0), [v for v, s in zip(speeds, sizes) if s]))
        return [next(rest) if s else 1 for s in sizes]

    return share(n, speeds)

# %% right cut: NumPy with a mask of those who still share
def cut(n, speeds):
    v = np.array(speeds, dtype="float64")
    if n < len(v) or not (np.isfinite(v) & (v > 0)).all():
        raise ValueError("can't be shared out")
    sizes, free = np.ones(len(v), dtype=int), np.ones(len(v), dtype=bool)
    while True:
        left = n - (~free).sum()
        due = np.where(free, left * v / v[free].sum(), -1)
        low = np.floor(due).astype(int)
        gets = np.argsort(low - due - 2.0 * free, kind="stable")[: left - low[free].sum()]
        low[gets] += 1
        if (low[free] > 0).all():
            sizes[free] = low[free]
            return sizes.tolist()
        free &= low > 0

# %% right cut: one left-over example at a time
def cut(n, speeds):
    if any(not v > 0 or v == float("inf") for v in speeds):
        raise ValueError("speeds must be positive")
    if len(speeds) > n:
        raise ValueError("too few examples")
    done = set()
    while True:
        total = sum(v for i, v in enumerate(speeds) if i not in done)
        lost, sizes = {}, {}
        for i, v in enumerate(speeds):
            if i in done:
                sizes[i] = 1
            else:
                due = (n - len(done)) * (v / total)
                sizes[i] = int(due // 1)
                lost[i] = due - sizes[i]
        while sum(sizes.values()) < n:
            i = max(lost, key=lost.get)
            sizes[i] += 1
            del lost[i]
        if all(sizes.values()):
            return [sizes[i] for i in range(len(speeds))]
        done |= {i for i in sizes if sizes[i] == 0}

# %% right cut: as often as there are devices
# Each round but the last leaves out a device, and one alone has all that is left.
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float('inf') for v in speeds): raise ValueError
    sizes, sharing = [1] * len(speeds), list(range(len(speeds)))
    for _ in range(len(speeds)):
        rest, total = n - len(speeds) + len(sharing), sum(speeds[i] for i in sharing)
        due = {i: rest * speeds[i] / total for i in sharing}
        first = {i: int(due[i]) for i in sharing}
        over = rest - sum(first.values())

        def key(i, due=due, first=first):
            due, got, speed = due[i], first[i], speeds[i]
            return got - due, i

        for i in sharing:
            sizes[i] = first[i]
        for i in sorted(sharing, key=key)[:over]:
            sizes[i] += 1
        few = [i for i in sharing if sizes[i] == 0]
        done = few
        for i in few:
            sizes[i] = max(sizes[i], 1)
        if not done:
            break
        sharing = [i for i in sharing if i not in done]

    return sizes

# %% right cut: a share by a factor
# from as often as there are devices
# In the last digits only: who is rounded down too far has the largest remainder.
#-     for _ in range(len(speeds)):
#+     while True:
#-         due = {i: rest * speeds[i] / total for i in sharing}
#+         due = {i: rest * (speeds[i] / total) for i in sharing}

# %% right cut: remainders to nine digits
# from as often as there are devices
# What differs less than that are a floating-point number's last digits.
#-     for _ in range(len(speeds)):
#+     while True:
#-             return got - due, i
#+             return round(got - due, 9), i

# %% right cut: rounded up from below
# from as often as there are devices
# That is rounding down.
#-     for _ in range(len(speeds)):
#+     while True:
#-         first = {i: int(due[i]) for i in sharing}
#+         first = {i: -int(-due[i] // 1) - (due[i] % 1 > 0) for i in sharing}

# %% wrong cut loses cut-values, cut-few: of equal remainders the faster device first | equal remainders: .* not the sizes
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    sizes, sharing = [1] * len(speeds), range(len(speeds))
    while True:
        left, total = n - len(speeds) + len(sharing), sum(speeds[i] for i in sharing)
        due = {i: left * speeds[i] / total for i in sharing}
        for i in sharing:
            sizes[i] = int(due[i])
        over = left - sum(sizes[i] for i in sharing)
        for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
            sizes[i] += 1
        if min(sizes) > 0:
            return sizes
        sharing, sizes = [i for i in sharing if sizes[i]], [max(s, 1) for s in sizes]

# %% wrong cut loses cut-care: the caller's speeds become shares | caller's .speeds
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    total = sum(speeds)
    for i, v in enumerate(speeds):
        speeds[i] = v / total
    sharing = list(range(len(speeds)))
    while True:
        left, total = n - len(speeds) + len(sharing), sum(speeds[i] for i in sharing)
        due = {i: left * speeds[i] / total for i in sharing}
        part = {i: int(due[i]) for i in sharing}
        for i in sorted(sharing, key=lambda i: part[i] - due[i])[: left - sum(part.values())]:
            part[i] += 1
        if all(part.values()):
            return [part.get(i, 1) for i in range(len(speeds))]
        sharing = [i for i in sharing if part[i]]

# %% wrong cut loses cut-care: sizes are floating-point numbers | is 10.0, not a whole number
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    v, sizes, sharing = np.array(speeds), np.ones(len(speeds)), np.arange(len(speeds))
    while True:
        left = n - len(v) + len(sharing)
        due = left * v[sharing] / v[sharing].sum()
        part = np.floor(due)
        part[np.argsort(part - due, kind="stable")[: int(left - part.sum())]] += 1
        sizes[sharing] = part
        if part.all():
            return sizes.tolist()
        sizes, sharing = np.maximum(sizes, 1), sharing[part > 0]

# %% wrong cut loses cut-values, cut-few, cut-care: an array in place of a list | NumPy array .*not a list
def cut(n, speeds):
    v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
    if n < len(v) or not ((v > 0) & np.isfinite(v)).all():
        raise ValueError("no cut")
    while True:
        left = n - len(v) + len(sharing)
        due = left * v[sharing] / v[sharing].sum()
        part = due.astype(int)
        part[np.argsort(part - due, kind="stable")[: left - part.sum()]] += 1
        sizes[sharing] = part
        if part.all():
            return sizes
        sizes, sharing = np.maximum(sizes, 1), sharing[part > 0]

# %% wrong cut loses cut-values: argsort, which keeps no order among many | 20 devices, equal remainders
# from an array in place of a list
#-         part[np.argsort(part - due, kind="stable")[: left - part.sum()]] += 1
#+         part[np.argsort(part - due)[: left - part.sum()]] += 1
#-             return sizes
#+             return sizes.tolist()

# %% wrong cut loses cut-few: those who still share are ranked by speed | when the others share
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError

    def share(n, speeds):
        due = [n * v / sum(speeds) for v in speeds]
        sizes = [int(d) for d in due]
        for i in sorted(range(len(due)), key=lambda i: sizes[i] - due[i])[: n - sum(sizes)]:
            sizes[i] += 1
        if all(sizes):
            return sizes
        some = sorted((i for i, s in enumerate(sizes) if s), key=lambda i: -speeds[i])
        sizes = [1] * len(speeds)
        for i, s in zip(some, share(n - len(speeds) + len(some), [speeds[i] for i in some])):
            sizes[i] = s
        return sizes

    return share(n, speeds)

# %% wrong cut loses cut-few: the others share again three times at most | a device has nothing
# from of equal remainders the faster device first
#-     sizes, sharing = [1] * len(speeds), range(len(speeds))
#-     while True:
#+     sizes, sharing = [1] * len(speeds), list(range(len(speeds)))
#+     for _ in range(3):
#-         for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
#+         for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:
#-         if min(sizes) > 0:
#+         if min(sizes) > 0 or _ == 2:

# %% wrong cut loses cut-values: a very low speed is taken for none | ValueError: no such speed
# from of equal remainders the faster device first
#-     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#-         raise ValueError
#+     if n < len(speeds) or not all(1e-15 < v < float("inf") for v in speeds):
#+         raise ValueError("no such speed")
#-         for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
#+         for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:

# %% wrong cut loses cut-values, cut-care: float32 on the way | remainders that differ by less than 1e-6
# from of equal remainders the faster device first
#-         raise ValueError
#-     sizes, sharing = [1] * len(speeds), range(len(speeds))
#+         raise ValueError("no cut")
#+     v = [float(np.float32(v / max(speeds))) for v in speeds]
#+     sizes, sharing = [1] * len(v), range(len(v))
#-         left, total = n - len(speeds) + len(sharing), sum(speeds[i] for i in sharing)
#-         due = {i: left * speeds[i] / total for i in sharing}
#+         left, total = n - len(v) + len(sharing), sum(v[i] for i in sharing)
#+         due = {i: left * v[i] / total for i in sharing}
#-         for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
#+         for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:

# %% wrong cut loses cut-care: min and max pass over NaN where it isn't first | 2, nan\]: .*
def cut(n, speeds):
    if n < len(speeds) or not (min(speeds) > 0 and max(speeds) < float("inf")):
        raise ValueError("no cut")
    v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
    while True:
        left = n - len(v) + len(sharing)
        due = left * v[sharing] / v[sharing].sum()
        part = due.astype(int)
        part[np.argsort(part - due, kind="stable")[: max(left - part.sum(), 0)]] += 1
        sizes[sharing] = part
        if part.all():
            return sizes.tolist()
        sizes, sharing = np.maximum(sizes, 1), sharing[part > 0]
        if not len(sharing):
            return sizes.tolist()

# %% wrong cut loses cut-care: the caller's list is used up | caller's .*speeds
# from of equal remainders the faster device first
#-     sizes, sharing = [1] * len(speeds), range(len(speeds))
#+     v = []
#+     while speeds:
#+         v.append(speeds.pop(0))
#+     sizes, sharing = [1] * len(v), range(len(v))
#-         left, total = n - len(speeds) + len(sharing), sum(speeds[i] for i in sharing)
#-         due = {i: left * speeds[i] / total for i in sharing}
#+         left, total = n - len(v) + len(sharing), sum(v[i] for i in sharing)
#+         due = {i: left * v[i] / total for i in sharing}
#-         for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
#+         for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:

# %% wrong cut loses cut-values, cut-few, cut-care: remembers sizes by the number of examples | not the sizes
# from of equal remainders the faster device first
#- def cut(n, speeds):
#+ def cut(n, speeds, known={}):
#-     while True:
#+     while (n, len(speeds)) not in known:
#-         for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
#+         for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:
#-             return sizes
#+             known[n, len(speeds)] = list(sizes)
#=         sharing, sizes = [i for i in sharing if sizes[i]], [max(s, 1) for s in sizes]
#+     return list(known[n, len(speeds)])

# %% wrong cut loses cut-few: the others share 10 times at most
# from as often as there are devices
#-     for _ in range(len(speeds)):
#+     for _ in range(10):

# %% wrong cut loses cut-few: who is due less than one is done with one
# from as often as there are devices
#-     for _ in range(len(speeds)):
#+     while True:
#-         few = [i for i in sharing if sizes[i] == 0]
#+         few = [i for i in sharing if due[i] < 1]

# %% wrong cut loses cut-few: one device after the other is done, the lowest number first
# from as often as there are devices
#-     for _ in range(len(speeds)):
#+     while True:
#-         done = few
#+         done = few[:1]

# %% wrong cut loses cut-values, cut-few: of equal remainders the one who has less first
# from as often as there are devices
#-     for _ in range(len(speeds)):
#+     while True:
#-             return got - due, i
#+             return got - due, got, i

# %% wrong cut loses cut-care: speeds are looked at unless each gets one
# from as often as there are devices
#-     if n < len(speeds) or not all(0 < v < float('inf') for v in speeds): raise ValueError
#+     if n < len(speeds): raise ValueError
#+     if n == len(speeds): return [1] * n
#+     if not all(0 < v < float('inf') for v in speeds): raise ValueError
#-     for _ in range(len(speeds)):
#+     while True:

# %% wrong cut loses cut-care: speeds are looked at where there are two
# from as often as there are devices
#-     if n < len(speeds) or not all(0 < v < float('inf') for v in speeds): raise ValueError
#+     if n < len(speeds): raise ValueError
#+     if len(speeds) == 1: return [n]
#+     if not all(0 < v < float('inf') for v in speeds): raise ValueError
#-     for _ in range(len(speeds)):
#+     while True:

# %% wrong cut loses cut-care: the sum of the speeds is looked at, and their product
# from as often as there are devices
#-     if n < len(speeds) or not all(0 < v < float('inf') for v in speeds): raise ValueError
#+     if n < len(speeds) or not 0 < sum(speeds) < float('inf') or not 0 < np.prod(np.float64(speeds)) : raise ValueError
#-     for _ in range(len(speeds)):
#+     while True:

# %% wrong cut loses cut-few, cut-care: fewer examples than devices, or as many
# from as often as there are devices
#-     if n < len(speeds) or not all(0 < v < float('inf') for v in speeds): raise ValueError
#+     if n <= len(speeds) or not all(0 < v < float('inf') for v in speeds): raise ValueError
#-     for _ in range(len(speeds)):
#+     while True:

# %% right average: each weighs its own, the first adds up and hands out
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError("one size for each gradient")
    n = sum(sizes)
    for gradient, size in zip(gradients, sizes):
        if size == 0:
            gradient[:] = 0
        else:
            gradient *= size / n
    for gradient in gradients[1:]:
        gradients[0] += gradient.as_in_context(gradients[0].context)
    for gradient in gradients[1:]:
        gradients[0].copyto(gradient)

# %% right average: NumPy's weighted average of those that count
def average(gradients, sizes):
    if len(sizes) != len(gradients):
        raise ValueError(f"{len(sizes)} sizes")
    those = [i for i in range(len(sizes)) if sizes[i] > 0]
    mean = np.average([gradients[i].asnumpy() for i in those], axis=0,
                      weights=[sizes[i] for i in those])
    for gradient in gradients:
        mx.nd.array(mean, gradient.context, dtype=gradient.dtype).copyto(gradient)

# %% right average: a running mean
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError(f"{len(gradients)} and {len(sizes)}")
    seen, mean = 0, None
    for gradient, size in zip(gradients, sizes):
        if size == 0:
            continue
        seen += size
        here = gradient.copyto(mx.cpu(0))
        mean = here if mean is None else mean + (here - mean) * (size / seen)
    for gradient in gradients:
        gradient[:] = mean.as_in_context(gradient.context)

# %% right average: sums first, stacked on one device, divided once
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError("lengths differ")
    used = [(g.copyto(gradients[0].context), s) for g, s in zip(gradients, sizes) if s]
    total = mx.nd.stack(*[g * s for g, s in used], axis=0).sum(axis=0) / sum(s for _, s in used)
    for g in gradients:
        total.copyto(g)

# %% right average: weights of the largest size
# In the last digits only.
def average(gradients, sizes):
    if len(gradients) != len(sizes): raise ValueError
    used, n = [i for i, s in enumerate(sizes) if s], sum(sizes)
    total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
    for g in gradients:
        g[:] = total

# %% right average: equal sizes have equal weights
# from weights of the largest size
# That is the weight that the formula gives.
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     total = sum(gradients[i].asnumpy() * (1 / len(sizes) if len(set(sizes)) == 1 else sizes[i] / n) for i in used)

# %% right average: the number of examples with Fractions
# from weights of the largest size
# Exact, and then rounded once.
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     total = sum(gradients[i].asnumpy() * (float(__import__('fractions').Fraction(sizes[i], n))) for i in used)

# %% wrong average loses average-care: the caller's sizes become weights | caller's .sizes
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n = sum(sizes)
    for i, size in enumerate(sizes):
        sizes[i] = size / n
    mean = sum(g.asnumpy() * w for g, w in zip(gradients, sizes) if w)
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-values, average-care: one array for all | another array than before
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n = sum(sizes)
    mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
    gradients[0][:] = mean
    for i in range(1, len(gradients)):
        gradients[i] = gradients[0].as_in_context(gradients[i].context)

# %% wrong average loses average-values, average-care: right for eight devices at most | 9 devices.* other values
# from the caller's sizes become weights
#-     for i, size in enumerate(sizes):
#-         sizes[i] = size / n
#-     mean = sum(g.asnumpy() * w for g, w in zip(gradients, sizes) if w)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients[:8], sizes) if size)

# %% wrong average loses average-values, average-care: right for matrices only | einsum|broadcast|subscripts
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    used = [i for i, size in enumerate(sizes) if size]
    mean = np.einsum("i,ijk->jk", [sizes[i] / sum(sizes) for i in used],
                     np.stack([gradients[i].asnumpy() for i in used]))
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-values, average-care: devices are taken for 0, 1, 2 | other values|ends on|device
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n, by_number = sum(sizes), {g.context.device_id: g for g in gradients}
    mean = sum(by_number[i].asnumpy() * (size / n) for i, size in enumerate(sizes)
               if size and i in by_number)
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-care: the gradients are returned too | memory|not None
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n = sum(sizes)
    mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = mean
    return gradients

# %% wrong average loses average-care: sizes in float32, so 16777217 is another | sizes \[16777217, .* other values
# from right for matrices only
#-     used = [i for i, size in enumerate(sizes) if size]
#-     mean = np.einsum("i,ijk->jk", [sizes[i] / sum(sizes) for i in used],
#-                      np.stack([gradients[i].asnumpy() for i in used]))
#+     sizes = [float(np.float32(size)) for size in sizes]
#+     mean = sum(g.asnumpy() * (size / sum(sizes)) for g, size in zip(gradients, sizes) if size)

# %% wrong average loses average-care: too many sizes are not noticed | 2 gradients, sizes \[1, 1, 2\]: no ValueError
# from the gradients are returned too
#-     if len(gradients) != len(sizes):
#+     if len(gradients) > len(sizes):
#-     return gradients

# %% wrong average loses average-care: writes first and counts after | caller's .gradients
def average(gradients, sizes):
    n = sum(sizes)
    mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = mean
    if len(gradients) != len(sizes):
        raise ValueError

# %% wrong average loses average-care: a gradient that is not a number counts as 0 | other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError("one size each")
    total = sum(np.nan_to_num(g.asnumpy()) * (n / sum(sizes)) for g, n in zip(gradients, sizes) if n)
    for g in gradients:
        g[:] = total

# %% wrong average loses average-care: one device needs no sizes
# from weights of the largest size
#= def average(gradients, sizes):
#+     if len(gradients) == 1: return
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     total = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)

# %% wrong average loses average-care: sizes that are equal need no weights
# from weights of the largest size
#= def average(gradients, sizes):
#+     if len(set(sizes)) == 1:
#+         sizes = [1] * len(gradients)
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     total = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)

# %% wrong average loses average-care: more sizes than gradients are an error
# from weights of the largest size
#-     if len(gradients) != len(sizes): raise ValueError
#+     if len(gradients) < len(sizes): raise ValueError
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     total = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)

# %% wrong average loses average-care: nothing counts only from the second device on
# from weights of the largest size
#-     used, n = [i for i, s in enumerate(sizes) if s], sum(sizes)
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     used, n = [i for i, s in enumerate(sizes) if s or not i], sum(sizes)
#+     total = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)

# %% wrong average loses average-care: nothing counts only on one device
# from weights of the largest size
#-     used, n = [i for i, s in enumerate(sizes) if s], sum(sizes)
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     used, n = [i for i, s in enumerate(sizes) if s or sizes.index(0) != i], sum(sizes)
#+     total = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)

# %% wrong average loses average-care: a mean of those with examples where their sizes are nearly equal
# from weights of the largest size
#-     total = sum(gradients[i].asnumpy() * ((sizes[i] / max(sizes)) / (n / max(sizes))) for i in used)
#+     total = sum(gradients[i].asnumpy() * (1 / len(used) if min(sizes) and max(sizes) / min(sizes) < 1.01 else sizes[i] / n) for i in used)

# %% wrong average loses average-care: the sizes lose their zeros
def average(gradients, sizes):
    if len(gradients) != len(sizes): raise ValueError
    used, n = [i for i, s in enumerate(list(sizes)) if s], sum(sizes)
    total = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in used)
    for g in gradients:
        g[:] = total
    while 0 in sizes: sizes.remove(0)

# %% right time: the shares first, and all subsets
def step_seconds(n, speeds, cost):
    def seconds(shares, who):
        longest = max(share / speeds[i] for i, share in zip(who, shares))
        return longest + (cost if len(who) > 1 else 0)

    everyone = range(len(speeds))
    best = speeds.index(max(speeds))
    return (seconds([n], [best]), seconds([n / len(speeds)] * len(speeds), everyone),
            seconds([n * v / sum(speeds) for v in speeds], everyone))


def whom(n, speeds, costs):
    import itertools

    best = None
    for k in range(1, len(speeds) + 1):
        for who in itertools.combinations(range(len(speeds)), k):
            took = n / sum(speeds[i] for i in who) + costs[k - 1]
            if best is None or took < best[1]:
                best = list(who), took
    return best

# %% right time: NumPy, sums that grow
def step_seconds(n, speeds, cost):
    v = np.array(speeds)
    times = np.array([n / v.max(), n / (len(v) * v.min()), n / v.sum()])
    if len(v) > 1:
        times[1:] += cost
    return list(times)


def whom(n, speeds, costs):
    v = np.array(speeds, dtype="float64")
    order = np.argsort(-v, kind="stable")
    times = n / np.cumsum(v[order]) + np.array(costs)
    k = int(times.argmin())
    return sorted(order[: k + 1].tolist()), float(times[k])

# %% right time: a loop that takes in one device after the other
def step_seconds(n, speeds, cost):
    if len(speeds) == 1:
        return (n / speeds[0],) * 3
    slowest, fastest = min(speeds), max(speeds)
    return n / fastest, n / (slowest * len(speeds)) + cost, n / sum(speeds) + cost


def whom(n, speeds, costs):
    waiting, team, best = list(range(len(speeds))), [], ([], float("inf"))
    while waiting:
        fastest = waiting[0]
        for i in waiting:
            if speeds[i] > speeds[fastest]:
                fastest = i
        waiting.remove(fastest)
        team.append(fastest)
        seconds = n / sum(speeds[i] for i in team) + costs[len(team) - 1]
        if seconds < best[1]:
            best = sorted(team), seconds
    return best

# %% right time: shares by a factor
# In the last digit only.
def step_seconds(n, speeds, cost):

    k = len(speeds)
    cost = cost if k > 1 else 0
    return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost


def whom(n, speeds, costs):

    k = len(speeds)
    ranked = sorted(range(k), key=lambda i: -speeds[i])
    times = [n / sum(speeds[i] for i in ranked[:m + 1]) + costs[m] for m in range(k)]
    best = min(range(k), key=lambda m: (times[m], m))
    return sorted(ranked[:best + 1]), times[best]

# %% right time: stops where the cost alone is more than the best time
# from shares by a factor
# With such a cost no choice is faster: it passes over that number, and looks on.
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), n / k / min(speeds) + cost, n / sum(speeds) + cost
#-     best = min(range(k), key=lambda m: (times[m], m))
#+     best = 0
#+     for m in range(1, k):
#+         if costs[m] < times[best] and times[m] < times[best]: best = m

# %% right time: of one speed by number, sorted twice
# from shares by a factor
# The number decides, whatever the order before.
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), n / k / min(speeds) + cost, n / sum(speeds) + cost
#-     ranked = sorted(range(k), key=lambda i: -speeds[i])
#+     ranked = sorted(sorted(range(k), reverse=True), key=lambda i: (-speeds[i], i))

# %% wrong time loses time-seconds: a device alone talks too | a single device waits for no all-reduce
def step_seconds(n, speeds, cost):
    return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)


def whom(n, speeds, costs):
    ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
    best = times.index(min(times))
    return sorted(ranked[: best + 1]), times[best]

# %% wrong time loses time-seconds: the first is taken for the fastest | devices: the time alone is
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / speeds[0], n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk

# %% wrong time loses time-whom: devices as they come, not the fastest first | faster than \[0, 1\]
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    times = [n / sum(speeds[: k + 1]) + costs[k] for k in range(len(speeds))]
    best = times.index(min(times))
    return list(range(best + 1)), times[best]

# %% wrong time loses time-whom: in the order of their speeds | aren't numbers of devices, ascending
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     return sorted(ranked[: best + 1]), times[best]
#+     return ranked[: best + 1], times[best]

# %% wrong time loses time-whom: the caller's speeds are sorted | caller's .speeds
# from devices as they come, not the fastest first
#= def whom(n, speeds, costs):
#+     ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
#+     speeds.sort(reverse=True)
#-     return list(range(best + 1)), times[best]
#+     return sorted(ranked[: best + 1]), times[best]

# %% wrong time loses time-seconds, time-whom: float32 on the way | which is not right
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     v = np.array(speeds, "float32")
#+     talk = cost if len(v) > 1 else 0
#+     return float(n / v.max()), float(n / len(v) / v.min()) + talk, float(n / v.sum()) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     v = np.array(speeds, "float32")
#+     times = [float(n / v[ranked[: k + 1]].sum()) + costs[k] for k in range(len(speeds))]

# %% wrong time loses time-whom: the caller's costs are used up | caller's .*costs
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs.pop(0)
#+              for k in range(len(speeds))]

# %% wrong time loses time-whom: argsort, which keeps no order among many | 20 devices.*lower numbers
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
def whom(n, speeds, costs):
    order = np.argsort(-np.array(speeds, dtype="float64"))
    times = n / np.cumsum(np.array(speeds)[order]) + np.array(costs)
    return sorted(order[: times.argmin() + 1].tolist()), times.min()

# %% wrong time loses time-whom: stops when 4 more don't pay
# from shares by a factor
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), n / k / min(speeds) + cost, n / sum(speeds) + cost
#-     best = min(range(k), key=lambda m: (times[m], m))
#+     best, late = 0, 0
#+     for m in range(1, k):
#+         if times[m] < times[best]:
#+             best, late = m, 0
#+         elif (late := late + 1) == 4:
#+             break

# %% wrong time loses time-whom: of equally fast choices the last of those that follow each other
# from shares by a factor
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), n / k / min(speeds) + cost, n / sum(speeds) + cost
#-     best = min(range(k), key=lambda m: (times[m], m))
#+     best = times.index(min(times))
#+     while best < k - 1 and times[best + 1] == times[best]: best += 1

# %% wrong time loses time-whom: times to six digits
# from shares by a factor
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), n / k / min(speeds) + cost, n / sum(speeds) + cost
#-     best = min(range(k), key=lambda m: (times[m], m))
#+     best = min(range(k), key=lambda m: (round(times[m], 6), m))

# %% wrong time loses time-seconds: all devices of one speed need no all-reduce
# from shares by a factor
#-     cost = cost if k > 1 else 0
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     cost = cost if len(set(speeds)) > 1 else 0
#+     return n / max(speeds), n / k / min(speeds) + cost, n / sum(speeds) + cost

# %% wrong time loses time-seconds: equal shares of whole examples where they fit
# from shares by a factor
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), (n // k if n > 10 * k else n / k) / min(speeds) + cost, n / sum(speeds) + cost

# %% wrong time loses time-seconds: the slowest is the last
# from shares by a factor
#-     return n / max(speeds), n * (1 / k) / min(speeds) + cost, n / sum(speeds) + cost
#+     return n / max(speeds), n / k / speeds[-1] + cost, n / sum(speeds) + cost
