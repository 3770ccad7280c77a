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

# %% wrong cut loses cut-values, cut-few: each share rounded for itself | 5, 2, 2, 2\] add up to 11
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    return [max(1, round(n * v / sum(speeds))) for v in speeds]

# %% wrong cut loses cut-values, cut-few: every share rounded up | add up to 11
# from each share rounded for itself
#-     return [max(1, round(n * v / sum(speeds))) for v in speeds]
#+     return [int(np.ceil(n * v / sum(speeds))) for v in speeds]

# %% wrong cut loses cut-values, cut-few: the last takes the rest | 2, 2, 2, 4\] are not the sizes
# from each share rounded for itself
#-     return [max(1, round(n * v / sum(speeds))) for v in speeds]
#+     sizes = [round(n * v / sum(speeds)) for v in speeds[:-1]]
#+     return [*sizes, n - sum(sizes)]

# %% wrong cut loses cut-values, cut-few: what is left goes to the fastest | 7, 1, 1, 1\], not
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    sizes = [max(1, int(n * v / sum(speeds))) for v in speeds]
    sizes[int(np.argmax(speeds))] += n - sum(sizes)
    return sizes

# %% wrong cut loses cut-values, cut-few: what is left, to the first devices | 6, 2, 1, 1\], not
# from what is left goes to the fastest
#-     sizes[int(np.argmax(speeds))] += n - sum(sizes)
#+     i = 0
#+     while sum(sizes) != n:
#+         step = 1 if sum(sizes) < n else -1
#+         if sizes[i] + step > 0:
#+             sizes[i] += step
#+         i = (i + 1) % len(sizes)

# %% wrong cut loses cut-values, cut-few: one example of the remainder is forgotten | add up to 9
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    due = [n * v / sum(speeds) for v in speeds]
    sizes = [int(d) for d in due]
    order = sorted(range(len(due)), key=lambda i: sizes[i] - due[i])
    for i in order[: max(n - sum(sizes) - 1, 0)]:
        sizes[i] += 1
    return [max(1, size) for size in sizes]

# %% wrong cut loses cut-values, cut-few: sorted and turned round, so ties too | 5, 1, 2, 2\], not
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
    while True:
        left = n - len(v) + len(sharing)
        due = left * v[sharing] / v[sharing].sum()
        part = due.astype(int)
        part[np.argsort(due - part)[::-1][: left - part.sum()]] += 1
        sizes[sharing] = part
        if part.all():
            return sizes.tolist()
        sizes, sharing = np.maximum(sizes, 1), sharing[part > 0]

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

# %% wrong cut loses cut-values, cut-few: the ends are rounded, not the shares | 5, 2, 1, 2\], not
# from each share rounded for itself
#-     return [max(1, round(n * v / sum(speeds))) for v in speeds]
#+     ends = np.round(n * np.cumsum([0, *speeds]) / np.sum(speeds)).astype(int)
#+     return np.diff(ends).tolist()

# %% wrong cut loses cut-few: chapter 12's cut, which takes back one by one | 1, 7, 3\], not
def cut(n, speeds):
    speeds = np.asarray(speeds, dtype="float64")
    if not (np.isfinite(speeds) & (speeds > 0)).all() or n < len(speeds):
        raise ValueError("no cut")
    due = n * speeds / speeds.sum()
    sizes = np.maximum(np.floor(due), 1).astype(int)
    while sizes.sum() != n:
        one = np.sign(n - sizes.sum())
        claim = np.where(sizes + one >= 1, one * (due - sizes), -np.inf)
        sizes[claim.argmax()] += one
    return sizes.tolist()

# %% wrong cut loses cut-few: a device may have nothing | a device has nothing
# from one example of the remainder is forgotten
#-     order = sorted(range(len(due)), key=lambda i: sizes[i] - due[i])
#-     for i in order[: max(n - sum(sizes) - 1, 0)]:
#+     for i in sorted(range(len(due)), key=lambda i: sizes[i] - due[i])[: n - sum(sizes)]:
#-     return [max(1, size) for size in sizes]
#+     return sizes

# %% wrong cut loses cut-few: who has nothing gets an example that there isn't | add up to 12
# from one example of the remainder is forgotten
#=         raise ValueError
#+     if n == len(speeds):
#+         return [1] * n
#-     order = sorted(range(len(due)), key=lambda i: sizes[i] - due[i])
#-     for i in order[: max(n - sum(sizes) - 1, 0)]:
#+     for i in sorted(range(len(due)), key=lambda i: sizes[i] - due[i])[: n - sum(sizes)]:

# %% wrong cut loses cut-few: rule 3 is applied once, and not again | a device has nothing
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError

    def share(n, speeds):
        due = [n * v / sum(speeds) for v in speeds]
        sizes = [int(d) for d in due]
        for i in sorted(range(len(due)), key=lambda i: sizes[i] - due[i])[: n - sum(sizes)]:
            sizes[i] += 1
        return sizes

    sizes = share(n, speeds)
    some = [i for i, size in enumerate(sizes) if size]
    result = [1] * len(speeds)
    for i, size in zip(some, share(n - len(speeds) + len(some), [speeds[i] for i in some])):
        result[i] = size
    return result

# %% wrong cut loses cut-values, cut-few, cut-care: one each first, the rest in proportion | 4, 2, 2, 2\], not
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    due = [(n - len(speeds)) * v / sum(speeds) for v in speeds]
    sizes = [1 + int(d) for d in due]
    for i in sorted(range(len(due)), key=lambda i: sizes[i] - due[i])[: n - sum(sizes)]:
        sizes[i] += 1
    return sizes

# %% wrong cut loses cut-values, cut-few, cut-care: right for two devices only | 22, 39, 39\], not
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    due = n * speeds[0] / sum(speeds)
    first = min(max(int(due + 0.5), 1), n - len(speeds) + 1)
    rest = n - first
    k = len(speeds) - 1
    return [first] + [rest // k + (i < rest % k) for i in range(k)]

# %% wrong cut loses cut-values, cut-few, cut-care: equal shards, whatever the speeds | \[128, 128\], not
# from each share rounded for itself
#-     return [max(1, round(n * v / sum(speeds))) for v in speeds]
#+     return [n // len(speeds) + (i < n % len(speeds)) for i in range(len(speeds))]

# %% wrong cut loses cut-care: NaN and infinity pass for positive | nan\]: no ValueError
# from sorted and turned round, so ties too
#-     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#-         raise ValueError
#=     v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
#+     if n < len(v) or (v <= 0).any():
#+         raise ValueError("no cut")
#-         part[np.argsort(due - part)[::-1][: left - part.sum()]] += 1
#+         part[np.argsort(part - due, kind="stable")[: left - part.sum()]] += 1

# %% wrong cut loses cut-care: only the sum of the speeds is looked at | 0\]: no ValueError
def cut(n, speeds):
    if n < len(speeds) or not 0 < sum(speeds) < float("inf"):
        raise ValueError("no cut")
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

# %% wrong cut loses cut-care: the caller's speeds become shares | caller's .speeds
# from only the sum of the speeds is looked at
#-     if n < len(speeds) or not 0 < sum(speeds) < float("inf"):
#-         raise ValueError("no cut")
#+     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#+         raise ValueError
#+     total = sum(speeds)
#+     for i, v in enumerate(speeds):
#+         speeds[i] = v / total

# %% wrong cut loses cut-care: sizes are floating-point numbers | is 10.0, not a whole number
# from sorted and turned round, so ties too
#-     v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
#+     v, sizes, sharing = np.array(speeds), np.ones(len(speeds)), np.arange(len(speeds))
#-         part = due.astype(int)
#-         part[np.argsort(due - part)[::-1][: left - part.sum()]] += 1
#+         part = np.floor(due)
#+         part[np.argsort(part - due, kind="stable")[: int(left - part.sum())]] += 1

# %% wrong cut loses cut-values, cut-few, cut-care: an array in place of a list | NumPy array .*not a list
# from sorted and turned round, so ties too
#-     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#-         raise ValueError
#=     v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
#+     if n < len(v) or not ((v > 0) & np.isfinite(v)).all():
#+         raise ValueError("no cut")
#-         part[np.argsort(due - part)[::-1][: left - part.sum()]] += 1
#+         part[np.argsort(part - due, kind="stable")[: left - part.sum()]] += 1
#-             return sizes.tolist()
#+             return sizes

# %% wrong cut loses cut-values: argsort, which keeps no order among many | 20 devices, equal remainders
# from sorted and turned round, so ties too
#-     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#-         raise ValueError
#=     v, sizes, sharing = np.array(speeds), np.ones(len(speeds), dtype=int), np.arange(len(speeds))
#+     if n < len(v) or not ((v > 0) & np.isfinite(v)).all():
#+         raise ValueError("no cut")
#-         part[np.argsort(due - part)[::-1][: left - part.sum()]] += 1
#+         part[np.argsort(part - due)[: left - part.sum()]] += 1

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

# %% wrong cut loses cut-few: who has nothing takes one from the largest | \[1, 6, 4\]|not the sizes
def cut(n, speeds):
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError
    due = [n * v / sum(speeds) for v in speeds]
    sizes = [int(d) for d in due]
    for i in sorted(range(len(due)), key=lambda i: sizes[i] - due[i])[: n - sum(sizes)]:
        sizes[i] += 1
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes

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

# %% wrong cut loses cut-few, cut-care: raises where there is one example a device | 3 examples.*ValueError
# from of equal remainders the faster device first
#-     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#-         raise ValueError
#+     if n <= len(speeds) > 1 or not all(0 < v < float("inf") for v in speeds):
#+         raise ValueError("too few examples")
#-         for i in sorted(sharing, key=lambda i: (sizes[i] - due[i], -speeds[i]))[:over]:
#+         for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:

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
# from sorted and turned round, so ties too
#-     if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
#-         raise ValueError
#+     if n < len(speeds) or not (min(speeds) > 0 and max(speeds) < float("inf")):
#+         raise ValueError("no cut")
#-         part[np.argsort(due - part)[::-1][: left - part.sum()]] += 1
#+         part[np.argsort(part - due, kind="stable")[: max(left - part.sum(), 0)]] += 1
#=         sizes, sharing = np.maximum(sizes, 1), sharing[part > 0]
#+         if not len(sharing):
#+             return sizes.tolist()

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

# %% wrong average loses average-values, average-care: the mean of the means | holding 2 and 10: gradient 0 .* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    used = [g.asnumpy() for g, size in zip(gradients, sizes) if size]
    for g in gradients:
        g[:] = sum(used) / len(used)

# %% wrong average loses average-values, average-care: a sum, as by all-reduce | holding 2 and 10: gradient 0 .* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    total = sum(g.asnumpy() for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = total

# %% wrong average loses average-values, average-care: never divided by n | holding 2 and 10: gradient 0 .* other values
# from a sum, as by all-reduce
#-     total = sum(g.asnumpy() for g, size in zip(gradients, sizes) if size)
#+     total = sum(size * g.asnumpy() for g, size in zip(gradients, sizes) if size)

# %% wrong average loses average-values, average-care: divided by n and by k too | holding 2 and 10: gradient 0 .* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n = sum(sizes)
    mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
                    for g, size in zip(gradients, sizes)], axis=0)
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-values, average-care: weighted by time, few examples being slow | holding 2 and 10: gradient 0 .* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
    mean = sum(g * w for g, w in used) / sum(w for _, w in used)
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-values, average-care: one is written | holding 2 and 10: gradient 1 .* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n = sum(sizes)
    gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)

# %% wrong average loses average-values, average-care: rebound, not in place | another array than before: write into
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     for i, g in enumerate(gradients):
#+         gradients[i] = mx.nd.array(mean, g.context, dtype=g.dtype)

# %% wrong average loses average-values, average-care: it is only returned | holding 2 and 10: gradient 0 .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     return [mx.nd.array(mean, g.context, dtype=g.dtype) for g in gradients]

# %% wrong average loses average-values, average-care: each scales its own only | holding 2 and 10: gradient 0 .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     for g, size in zip(gradients, sizes):
#+         g[:] = g * (size / n) if size else 0

# %% wrong average loses average-values, average-care: adds what is changed | holding 2 and 10: gradient 1 .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     for g in gradients:
#+         g[:] = sum(other.asnumpy() * size / n for other, size in zip(gradients, sizes) if size)

# %% wrong average loses average-values, average-care: right for k = 2 only | 3 devices.* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    n = sum(sizes[:2])
    mean = sum(g.asnumpy() * size / n for g, size in zip(gradients[:2], sizes) if size)
    for g in gradients[:2]:
        g[:] = mean

# %% wrong average loses average-values, average-care: sizes sorted apart | sizes \[1, 2, 4\]
# from divided by n and by k too
#-     mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
#-                     for g, size in zip(gradients, sizes)], axis=0)
#+     pairs = zip(gradients, sorted(sizes, reverse=True))
#+     mean = sum(g.asnumpy() * size / n for g, size in pairs if size)

# %% wrong average loses average-values, average-care: runs on with the last size | 3 devices.* other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    used = [(g.asnumpy(), size) for g, size in zip(gradients, sizes) if size]
    mean, before = used[0]
    for g, size in used[1:]:
        mean = (mean * before + g * size) / (before + size)
        before = size
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-care: nothing times NaN is NaN | nan left over: .* other values
# from divided by n and by k too
#-     mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
#-                     for g, size in zip(gradients, sizes)], axis=0)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes))

# %% wrong average loses average-care: looks for NaN, but not for infinity | inf left over
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     n, arrays = sum(sizes), [g.asnumpy() for g in gradients]
#+     mean = sum(np.where(np.isnan(a), 0, a) * size / n for a, size in zip(arrays, sizes))

# %% wrong average loses average-care: a device without examples receives nothing | nan left over: gradient 1 .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     for g, size in zip(gradients, sizes):
#+         if size:
#+             g[:] = mean

# %% wrong average loses average-care: zip drops what has no partner | no ValueError
def average(gradients, sizes):
    n = sum(sizes)
    mean = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-care: float64 becomes float32 on the way | float64: .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(mx.nd.array(g.asnumpy()) * (size / n) for g, size in zip(gradients, sizes) if size)
#+     for g in gradients:
#+         mean.copyto(g)

# %% wrong average loses average-care: the caller's sizes become weights | caller's .sizes
# from divided by n and by k too
#-     mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
#-                     for g, size in zip(gradients, sizes)], axis=0)
#+     for i, size in enumerate(sizes):
#+         sizes[i] = size / n
#+     mean = sum(g.asnumpy() * w for g, w in zip(gradients, sizes) if w)

# %% wrong average loses average-values, average-care: one array for all | another array than before
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
#+     gradients[0][:] = mean
#+     for i in range(1, len(gradients)):
#+         gradients[i] = gradients[0].as_in_context(gradients[i].context)

# %% wrong average loses average-values, average-care: a name is rebound in the loop | gradient 0 .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
#+     for g in gradients:
#+         g = mx.nd.array(mean, g.context, dtype=g.dtype)

# %% wrong average loses average-values, average-care: the list is emptied | the caller's list .gradients. had
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError
    pairs = []
    while gradients:
        pairs.append((gradients.pop(), sizes[len(gradients)]))
    mean = sum(g.asnumpy() * (size / sum(sizes)) for g, size in pairs if size)
    for g, _ in pairs:
        g[:] = mean

# %% wrong average loses average-values, average-care: right for eight devices at most | 9 devices.* other values
# from divided by n and by k too
#-     mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
#-                     for g, size in zip(gradients, sizes)], axis=0)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients[:8], sizes) if size)

# %% wrong average loses average-values, average-care: right for matrices only | einsum|broadcast|subscripts
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     used = [i for i, size in enumerate(sizes) if size]
#+     mean = np.einsum("i,ijk->jk", [sizes[i] / sum(sizes) for i in used],
#+                      np.stack([gradients[i].asnumpy() for i in used]))

# %% wrong average loses average-values, average-care: devices are taken for 0, 1, 2 | other values|ends on|device
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     n, by_number = sum(sizes), {g.context.device_id: g for g in gradients}
#+     mean = sum(by_number[i].asnumpy() * (size / n) for i, size in enumerate(sizes)
#+                if size and i in by_number)

# %% wrong average loses average-care: the gradients are returned too | memory|not None
# from divided by n and by k too
#-     mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
#-                     for g, size in zip(gradients, sizes)], axis=0)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
#=         g[:] = mean
#+     return gradients

# %% wrong average loses average-care: weights in float32 | \[5, 2, 4\], float64: .* other values
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     weights = np.array(sizes, "float32") / np.float32(sum(sizes))
#+     mean = sum(g.asnumpy() * w.astype("float64") for g, w in zip(gradients, weights) if w)

# %% wrong average loses average-care: float64 through float32, but for equal sizes | \[3, 1\], float64: .* other values
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     n, kind = sum(sizes), gradients[0].dtype if len(set(sizes)) == 1 else "float32"
#+     mean = sum(g.asnumpy().astype(kind) * (size / n) for g, size in zip(gradients, sizes) if size)

# %% wrong average loses average-care: sizes in float32, so 16777217 is another | sizes \[16777217, .* other values
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     sizes = [float(np.float32(size)) for size in sizes]
#+     mean = sum(g.asnumpy() * (size / sum(sizes)) for g, size in zip(gradients, sizes) if size)

# %% wrong average loses average-care: only the last device may have nothing | sizes \[0, 3\].* other values
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     n, k = sum(sizes), len(sizes)
#+     mean = sum(gradients[i].asnumpy() * (sizes[i] / n) for i in range(k)
#+                if sizes[i] or i < k - 1)

# %% wrong average loses average-care: only the first device may have nothing | sizes \[4, 0\].* other values
# from divided by n and by k too
#-     mean = np.mean([g.asnumpy() * size / n if size else np.zeros(g.shape)
#-                     for g, size in zip(gradients, sizes)], axis=0)
#+     mean = sum(g.asnumpy() * (sizes[i] / n) for i, g in enumerate(gradients) if sizes[i] or i)

# %% wrong average loses average-care: a device without examples counts for one | left over: .* other values
# from weighted by time, few examples being slow
#-     used = [(g.asnumpy(), 1 / size) for g, size in zip(gradients, sizes) if size]
#-     mean = sum(g * w for g, w in used) / sum(w for _, w in used)
#+     n = sum(max(size, 1) for size in sizes)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)

# %% wrong average loses average-care: a device without examples has zeros at the end | gradient 1 .* other values
# from one is written
#-     gradients[0][:] = sum(g.asnumpy() * size / n for g, size in zip(gradients, sizes) if size)
#+     mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
#+     for g, size in zip(gradients, sizes):
#+         g[:] = mean if size else 0

# %% wrong average loses average-care: too many sizes are not noticed | 2 gradients, sizes \[1, 1, 2\]: no ValueError
def average(gradients, sizes):
    if len(gradients) > len(sizes):
        raise ValueError
    n = sum(sizes)
    mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = mean

# %% wrong average loses average-care: writes first and counts after | caller's .gradients
def average(gradients, sizes):
    n = sum(sizes)
    mean = sum(g.asnumpy() * (size / n) for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = mean
    if len(gradients) != len(sizes):
        raise ValueError

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

# %% wrong time loses time-seconds: a device alone talks too | a single device waits for no all-reduce
def step_seconds(n, speeds, cost):
    return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)


def whom(n, speeds, costs):
    ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
    best = times.index(min(times))
    return sorted(ranked[: best + 1]), times[best]

# %% wrong time loses time-seconds, time-whom: the all-reduce is forgotten | with equal shares is 0.2,
def step_seconds(n, speeds, cost):
    return n / max(speeds), n / len(speeds) / min(speeds), n / sum(speeds)


def whom(n, speeds, costs):
    return list(range(len(speeds))), n / sum(speeds)

# %% wrong time loses time-seconds: equal shares, mean of the devices' times | with equal shares is 0.16,
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     k = len(speeds)
#+     talk = cost if k > 1 else 0
#+     equal = sum(n / k / v for v in speeds) / k
#+     return n / max(speeds), equal + talk, n / sum(speeds) + talk

# %% wrong time loses time-seconds: equal shares, always among two | with equal shares is 0.31,
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / 2 / min(speeds) + talk, n / sum(speeds) + talk

# %% wrong time loses time-seconds: the first is taken for the fastest | devices: the time alone is
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / speeds[0], n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk

# %% wrong time loses time-whom: everybody or the fastest alone, as with a fixed cost | is faster
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    alone, together = n / max(speeds), n / sum(speeds) + costs[-1]
    if together < alone:
        return list(range(len(speeds))), together
    return [speeds.index(max(speeds))], alone

# %% wrong time loses time-whom: stops at the first device that doesn't pay | is faster
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    chosen, seconds = ranked[:1], n / speeds[ranked[0]]
    for k in range(2, len(ranked) + 1):
        longer = n / sum(speeds[i] for i in ranked[:k]) + costs[k - 1]
        if longer >= seconds:
            break
        chosen, seconds = ranked[:k], longer
    return sorted(chosen), seconds

# %% wrong time loses time-whom: devices as they come, not the fastest first | faster than \[0, 1\]
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    times = [n / sum(speeds[: k + 1]) + costs[k] for k in range(len(speeds))]
    best = times.index(min(times))
    return list(range(best + 1)), times[best]

# %% wrong time loses time-whom: places in the ranking, not numbers of devices | faster than \[0\]
# from devices as they come, not the fastest first
#-     times = [n / sum(speeds[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     ranked = sorted(speeds, reverse=True)
#+     times = [n / sum(ranked[: k + 1]) + costs[k] for k in range(len(ranked))]

# %% wrong time loses time-whom: in the order of their speeds | aren't numbers of devices, ascending
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     return sorted(ranked[: best + 1]), times[best]
#+     return ranked[: best + 1], times[best]

# %% wrong time loses time-whom: the cost of one device more | faster than \[0, 1\]
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     times = [n / sum(speeds[i] for i in ranked[:k]) + costs[min(k, len(costs) - 1)]
#+              for k in range(1, len(speeds) + 1)]

# %% wrong time loses time-whom: of equally fast choices the larger one | just as fast
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    best, seconds = 0, float("inf")
    for k in range(len(speeds)):
        took = n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k]
        if took <= seconds:
            best, seconds = k, took
    return sorted(ranked[: best + 1]), seconds

# %% wrong time loses time-whom: ranked upwards and turned round, so ties too | lower numbers
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
#+     ranked = sorted(range(len(speeds)), key=lambda i: speeds[i])[::-1]

# %% wrong time loses time-whom: costs added up as if each were one device's | is faster
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + sum(costs[: k + 1])
#+              for k in range(len(speeds))]

# %% wrong time loses time-whom: the caller's speeds are sorted | caller's .speeds
# from devices as they come, not the fastest first
#= def whom(n, speeds, costs):
#+     ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
#+     speeds.sort(reverse=True)
#-     return list(range(best + 1)), times[best]
#+     return sorted(ranked[: best + 1]), times[best]

# %% wrong time loses time-seconds: the all-reduce of each pair | 9 devices|3 devices: the time with equal
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost * (len(speeds) - 1)
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk

# %% wrong time loses time-seconds, time-whom: float32 on the way | which is not right
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     v = np.array(speeds, "float32")
#+     talk = cost if len(v) > 1 else 0
#+     return float(n / v.max()), float(n / len(v) / v.min()) + talk, float(n / v.sum()) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     v = np.array(speeds, "float32")
#+     times = [float(n / v[ranked[: k + 1]].sum()) + costs[k] for k in range(len(speeds))]

# %% wrong time loses time-seconds: equal shares are whole numbers | with equal shares
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), -(-n // len(speeds)) / min(speeds) + talk, n / sum(speeds) + talk

# %% wrong time loses time-whom: step_seconds sorts the caller's speeds | caller's .speeds
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     speeds.sort()
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / speeds[-1], n / len(speeds) / speeds[0] + talk, n / sum(speeds) + talk

# %% wrong time loses time-whom: the caller's costs are used up | caller's .*costs
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs.pop(0)
#+              for k in range(len(speeds))]

# %% wrong time loses time-whom: the chosen in an array | .chosen. is a NumPy array
# from devices as they come, not the fastest first
#-     times = [n / sum(speeds[: k + 1]) + costs[k] for k in range(len(speeds))]
#-     best = times.index(min(times))
#-     return list(range(best + 1)), times[best]
#+     order = np.argsort(-np.array(speeds, dtype="float64"), kind="stable")
#+     times = n / np.cumsum(np.array(speeds)[order]) + np.array(costs)
#+     return np.sort(order[: times.argmin() + 1]), times.min()

# %% wrong time loses time-whom: the chosen as floating-point numbers | 0.0, not a whole number
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     return sorted(ranked[: best + 1]), times[best]
#+     return sorted(float(i) for i in ranked[: best + 1]), times[best]

# %% wrong time loses time-whom: argsort, which keeps no order among many | 20 devices.*lower numbers
# from devices as they come, not the fastest first
#-     times = [n / sum(speeds[: k + 1]) + costs[k] for k in range(len(speeds))]
#-     best = times.index(min(times))
#-     return list(range(best + 1)), times[best]
#+     order = np.argsort(-np.array(speeds, dtype="float64"))
#+     times = n / np.cumsum(np.array(speeds)[order]) + np.array(costs)
#+     return sorted(order[: times.argmin() + 1].tolist()), times.min()

# %% wrong time loses time-whom: stops where the cost alone is more than the best | up and down|faster than
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    ranked, chosen, seconds = sorted(range(len(speeds)), key=lambda i: -speeds[i]), [], float("inf")
    for k, cost in enumerate(costs):
        if cost >= seconds:
            break
        took = n / sum(speeds[i] for i in ranked[: k + 1]) + cost
        if took < seconds:
            chosen, seconds = sorted(ranked[: k + 1]), took
    return chosen, seconds

# %% wrong time loses time-whom: the cost of two devices for any number | faster than|not right
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[k] for k in range(len(speeds))]
#+     times = [n / sum(speeds[i] for i in ranked[: k + 1]) + costs[min(k, 1)]
#+              for k in range(len(speeds))]

# %% wrong time loses time-whom: the time without the all-reduce | the time that they take is 0.128,
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     return sorted(ranked[: best + 1]), times[best]
#+     return sorted(ranked[: best + 1]), n / sum(speeds[i] for i in ranked[: best + 1])

# %% wrong time loses time-whom: a step within a thousandth is taken for equally fast | little difference: another choice is faster
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     talk = cost if len(speeds) > 1 else 0
#+     return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk
#-     best = times.index(min(times))
#+     best = next(k for k, took in enumerate(times) if took <= min(times) * 1.001)

# %% wrong time loses time-seconds, time-whom: not a number at all | is nan, which is not right
# from a device alone talks too
#-     return (n / max(speeds), n / len(speeds) / min(speeds) + cost, n / sum(speeds) + cost)
#+     return float("nan"), float("nan"), float("nan")
#-     return sorted(ranked[: best + 1]), times[best]
#+     return sorted(ranked[: best + 1]), float("nan")

# %% wrong average loses average-care: a gradient that is not a number counts as 0 | other values
def average(gradients, sizes):
    if len(gradients) != len(sizes):
        raise ValueError("one size each")
    total = sum(np.nan_to_num(g.asnumpy()) * (n / sum(sizes)) for g, n in zip(gradients, sizes) if n)
    for g in gradients:
        g[:] = total

# %% wrong time loses time-whom: times that differ by a ten-thousandth count as equal | .
def step_seconds(n, speeds, cost):
    talk = cost if len(speeds) > 1 else 0
    return n / max(speeds), n / len(speeds) / min(speeds) + talk, n / sum(speeds) + talk


def whom(n, speeds, costs):
    ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    times = [n / sum(speeds[i] for i in ranked[: k + 1]) + c for k, c in enumerate(costs)]
    best = next(k for k, t in enumerate(times) if t <= min(times) + 1e-4)
    return sorted(ranked[: best + 1]), times[best]
