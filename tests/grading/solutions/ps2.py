# %% right tree: gaps that double, then halve
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += send(right, left.context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            send(left, right)


# %% right tree: halves of the list, by recursion
def tree_allreduce(arrays, send):
    def up(part):
        if len(part) > 1:
            half = (len(part) + 1) // 2
            up(part[:half])
            up(part[half:])
            part[0][:] = part[0] + send(part[half], part[0].context)

    def down(part):
        if len(part) > 1:
            half = (len(part) + 1) // 2
            send(part[0], part[half])
            down(part[:half])
            down(part[half:])

    up(list(arrays))
    down(list(arrays))


# %% right tree: the list is folded until one is left, which is the last
def tree_allreduce(arrays, send):
    left, folds = list(range(len(arrays))), []
    while len(left) > 1:
        half = len(left) // 2
        folds.append(list(zip(left[:half], left[-half:])))
        left = left[half:]
    for fold in folds:
        for start, end in fold:
            arrays[end] += send(arrays[start], arrays[end].context)
    for fold in folds[::-1]:
        for start, end in fold:
            arrays[start][:] = send(arrays[end], arrays[start].context)


# %% right tree: each rank asks its own bits what to do
def tree_allreduce(arrays, send):
    k = len(arrays)
    bits = range((k - 1).bit_length())
    for bit in bits:
        for rank in range(k):
            if rank % (2 << bit) == 1 << bit:
                to = arrays[rank - (1 << bit)]
                mx.nd.elemwise_add(to, send(arrays[rank], to.context), out=to)
    for bit in reversed(bits):
        for rank in range(k):
            if rank % (2 << bit) == 1 << bit:
                send(arrays[rank - (1 << bit)], arrays[rank])


# %% wrong tree loses tree-values, tree-rounds: summed into device 0 only | device 1 .*what it had
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += send(right, left.context)
        gap *= 2


# %% wrong tree loses tree-values: the mean | has the mean, not the sum
def tree_allreduce(arrays, send):
    gap, k = 1, len(arrays)
    while gap < k:
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += send(right, left.context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            send(left, right)
    for array in arrays:
        array /= k


# %% wrong tree loses tree-values, tree-rounds: for powers of two only | 3 dev.*list index out
def tree_allreduce(arrays, send):
    k, gap = len(arrays), 1
    while gap < k:
        for i in range(0, k, 2 * gap):
            arrays[i] += send(arrays[i + gap], arrays[i].context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for i in range(0, k, 2 * gap):
            send(arrays[i], arrays[i + gap])


# %% wrong tree loses tree-values, tree-rounds: no partner, no part | device 0 of 3.*have the sum
def tree_allreduce(arrays, send):
    active, levels = list(arrays), []
    while len(active) > 1:
        pairs = [(active[i], active[i + 1]) for i in range(0, len(active) - 1, 2)]
        for left, right in pairs:
            left += send(right, left.context)
        levels.append(pairs)
        active = [left for left, _ in pairs]
    for pairs in reversed(levels):
        for left, right in pairs:
            send(left, right)


# %% wrong tree loses tree-values, tree-rounds: for two devices only | device 0 of 3.*have the sum
def tree_allreduce(arrays, send):
    if len(arrays) > 1:
        arrays[0] += send(arrays[1], arrays[0].context)
        send(arrays[0], arrays[1])


# %% wrong tree loses tree-rounds: sum, then broadcast, by device 0 alone | rounds
def tree_allreduce(arrays, send):
    for array in arrays[1:]:
        arrays[0] += send(array, arrays[0].context)
    for array in arrays[1:]:
        send(arrays[0], array)


# %% wrong tree loses tree-rounds: a tree up, but device 0 tells everybody | rounds
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += send(right, left.context)
        gap *= 2
    for array in arrays[1:]:
        send(arrays[0], array)


# %% wrong tree loses tree-rounds: a heap, whose nodes wait for two children | rounds
def tree_allreduce(arrays, send):
    for i in range(len(arrays) - 1, 0, -1):
        parent = arrays[(i - 1) // 2]
        parent += send(arrays[i], parent.context)
    for i in range(1, len(arrays)):
        send(arrays[(i - 1) // 2], arrays[i])


# %% wrong tree loses tree-rounds: neighbours add without a message | messages
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += right
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            send(left, right)


# %% wrong tree loses tree-rounds: all exchange with all partners, a butterfly | messages
def tree_allreduce(arrays, send):
    k, gap = len(arrays), 1
    whole = 1 << (k.bit_length() - 1)
    for i in range(whole, k):
        arrays[i - whole] += send(arrays[i], arrays[i - whole].context)
    while gap < whole:
        come = [send(arrays[i ^ gap], arrays[i].context) for i in range(whole)]
        for i in range(whole):
            arrays[i] += come[i]
        gap *= 2
    for i in range(whole, k):
        send(arrays[i - whole], arrays[i])


# %% wrong tree loses tree-values: new arrays in the list | has a new array; write into the old one
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for i in range(0, len(arrays) - gap, 2 * gap):
            arrays[i] = arrays[i] + send(arrays[i + gap], arrays[i].context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for i in range(0, len(arrays) - gap, 2 * gap):
            arrays[i + gap] = send(arrays[i], arrays[i + gap].context)


# %% wrong tree loses tree-values, tree-rounds: device 0's array k times | has an array on cpu.0.
def tree_allreduce(arrays, send):
    active = list(arrays)
    while len(active) > 1:
        for left, right in zip(active[::2], active[1::2]):
            left += send(right, left.context)
        active = active[::2]
    arrays[:] = active * len(arrays)


# %% wrong tree loses tree-values, tree-rounds: added on the way down too | does not have the sum
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += send(right, left.context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            right += send(left, right.context)


# %% wrong tree loses tree-values, tree-rounds: down in the order of up | device 3 of 4.*the sum
def tree_allreduce(arrays, send):
    pairs, gap = [], 1
    while gap < len(arrays):
        pairs += [(i, i + gap) for i in range(0, len(arrays) - gap, 2 * gap)]
        gap *= 2
    for low, high in pairs:
        arrays[low] += send(arrays[high], arrays[low].context)
    for low, high in pairs:
        send(arrays[low], arrays[high])


# %% wrong tree loses tree-values: added up in an array of float32 | lost digits
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            both = left.asnumpy() + send(right, left.context).asnumpy()
            left[:] = mx.nd.array(both, left.context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            send(left, right)


# %% wrong tree loses tree-values, tree-rounds: rank for device number | cpu.0. is not one of
def tree_allreduce(arrays, send):
    k, gap = len(arrays), 1
    while gap < k:
        for i in range(0, k - gap, 2 * gap):
            arrays[i] += send(arrays[i + gap], mx.cpu(i))
        gap *= 2
    while gap > 1:
        gap //= 2
        for i in range(0, k - gap, 2 * gap):
            arrays[i + gap][:] = send(arrays[i], mx.cpu(i + gap))


# %% wrong tree loses tree-values, tree-rounds: sums in new variables | still has what it had
def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left = left + send(right, left.context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            right = send(left, right.context)


# %% right ring: two loops, all messages of a step before any sum
def ring_allreduce(arrays, send):
    k = len(arrays)
    places = np.array_split(np.arange(arrays[0].size), k)
    flat = [a.reshape(-1) for a in arrays]

    def window(rank, c):
        part = places[c % k]
        return flat[rank % k][int(part[0]) : int(part[-1]) + 1] if len(part) else None

    for step in range(k - 1):
        come = {}
        for i in range(k):
            mine = window(i, i - step)
            if mine is not None:
                come[i] = send(mine, arrays[(i + 1) % k].context)
        for i, chunk in come.items():
            window(i + 1, i - step)[:] += chunk
    for step in range(k - 1):
        for i in range(k):
            mine = window(i, i + 1 - step)
            if mine is not None:
                send(mine, window(i + 1, i + 1 - step))


# %% right ring: one chunk after the other takes its two turns round
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    size, longer = divmod(n, k)
    start = 0
    for c in range(k):
        stop = start + size + (c < longer)
        if stop > start:
            chunks = [a.reshape((n,))[start:stop] for a in arrays]
            for hop in range(2 * (k - 1)):
                here, there = chunks[(c + hop) % k], chunks[(c + hop + 1) % k]
                come = send(here, there.context)
                there[:] = come if hop >= k - 1 else there + come
        start = stop


# %% right ring: copies of the chunks, written back at the end
def ring_allreduce(arrays, send):
    k, n, shape = len(arrays), arrays[0].size, arrays[0].shape
    ends = [round(n * c / k) for c in range(k + 1)]
    chunks = [[a.reshape(-1)[s:e].copy() if s < e else None for s, e in zip(ends, ends[1:])]
              for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            j, c = (i + 1) % k, (i - 1 - step) % k
            if chunks[i][c] is not None:
                come = send(chunks[i][c], arrays[j].context)
                chunks[j][c] = come + chunks[j][c] if step < k - 1 else come
    for a, parts in zip(arrays, chunks):
        a[:] = mx.nd.concat(*[p for p in parts if p is not None], dim=0).reshape(shape)


# %% wrong ring loses ring-values, ring-bytes: wrong chunk in the second half | have the sum, first
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1) for a in arrays]
    for half in range(2):
        for step in range(k - 1):
            for i in range(k):
                c, j = (i - step) % k, (i + 1) % k
                if ends[c] == ends[c + 1]:
                    continue
                here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
                if half == 0:
                    there += send(here, there.context)
                else:
                    send(here, there)


# %% wrong ring loses ring-values, ring-bytes: chunks summed against the ring | 3, .*have the sum
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1) for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-values, ring-bytes: the second half adds as well | 2, .*not have the sum
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1) for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] < ends[c + 1]:
                there = flat[j][ends[c] : ends[c + 1]]
                there += send(flat[i][ends[c] : ends[c + 1]], there.context)


# %% wrong ring loses ring-values, ring-bytes: the sums are never handed on | does not have the sum
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1) for a in arrays]
    for step in range(k - 1):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] < ends[c + 1]:
                there = flat[j][ends[c] : ends[c + 1]]
                there += send(flat[i][ends[c] : ends[c + 1]], there.context)


# %% wrong ring loses ring-values, ring-bytes: one step a half, as for k=2 | of 3, .*have the sum
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1) for a in arrays]
    for step in range(2 if k > 1 else 0):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
            if step == 0:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-values: the mean | has the mean, not the sum
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)
    for a in arrays:
        a /= k


# %% wrong ring loses ring-values, ring-bytes: the rest is left out | .10,.*at entry 9 of 10
def ring_allreduce(arrays, send):
    k, size = len(arrays), arrays[0].size // len(arrays)
    flat = [a.reshape(-1) for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if size == 0:
                continue
            here, there = (flat[r][c * size : (c + 1) * size] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-bytes: chunks rounded up, the last one shorter | a chunk of 1 entries
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    size = -(-n // k)
    ends = [min(c * size, n) for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] >= ends[c + 1]:
                continue
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-values, ring-bytes: empty chunks sent | .1,.: .* array without entries
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-values: the chunks are copies, never put back | still has what it had
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1).copy() for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (flat[r][ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-values: new arrays in the list | has a new array; write into the old one
def ring_allreduce(arrays, send):
    k, n, shape = len(arrays), arrays[0].size, arrays[0].shape
    ends = [n * c // k for c in range(k + 1)]
    flat = [a.reshape(-1).copy() for a in arrays]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (flat[r][ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)
    for i in range(k):
        arrays[i] = flat[i].reshape(shape)


# %% wrong ring loses ring-bytes: sums are handed on without messages | 2.k - 1. chunks of 12
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                there[:] = here.as_in_context(there.context)


# %% wrong ring loses ring-bytes: whole arrays are sent round | 2.k - 1. chunks of 12
def ring_allreduce(arrays, send):
    k = len(arrays)
    come = list(arrays)
    totals = [a.copy() for a in arrays]
    for _ in range(k - 1):
        come = [send(come[i - 1], arrays[i].context) for i in range(k)]
        for total, array in zip(totals, come):
            total += array
    for array, total in zip(arrays, totals):
        array[:] = total


# %% wrong ring loses ring-bytes: chunks summed straight from all devices | which isn't the next
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for phase in range(2):
        for c in range(k):
            if ends[c] == ends[c + 1]:
                continue
            parts = [a.reshape(-1)[ends[c] : ends[c + 1]] for a in arrays]
            for i in range(k):
                if i != c and phase == 0:
                    parts[c][:] += send(parts[i], arrays[c].context)
                elif i != c:
                    send(parts[c], parts[i])


# %% wrong ring loses ring-bytes: rows are taken for entries | a chunk of 6 entries
def ring_allreduce(arrays, send):
    k, n = len(arrays), len(arrays[0])
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (arrays[r][ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-bytes: zeros fill up the chunks and are sent along | all devices together
def ring_allreduce(arrays, send):
    k, n, shape = len(arrays), arrays[0].size, arrays[0].shape
    size = -(-n // k)
    rows = []
    for a in arrays:
        row = mx.nd.zeros(k * size, ctx=a.context, dtype=a.dtype)
        row[:n] = a.reshape(-1)
        rows.append(row.reshape((k, size)))
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            come = send(rows[i][c], arrays[j].context)
            rows[j][c] = rows[j][c] + come if step < k - 1 else come
    for a, row in zip(arrays, rows):
        a[:] = row.reshape(-1)[:n].reshape(shape)


# %% wrong ring loses ring-values, ring-bytes: next rank as device number | but cpu.0. is not one of
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            come = send(here, mx.cpu(j))
            there[:] = there + come if step < k - 1 else come


# %% wrong ring loses ring-bytes: the ring runs to the left | which isn't the next
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i + step) % k, (i - 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            if step < k - 1:
                there += send(here, there.context)
            else:
                send(here, there)


# %% wrong ring loses ring-values: received chunks pass through float32 | lost digits
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step) % k, (i + 1) % k
            if ends[c] == ends[c + 1]:
                continue
            here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
            come = send(here, there.context).asnumpy()
            there[:] = mx.nd.array(there.asnumpy() + come if step < k - 1 else come, there.context)


# %% right busiest: a table
def busiest(scheme, k, size):
    counts = {"first": k - 1, "tree": int(np.ceil(np.log2(k))), "ring": 2 * (k - 1) / k}
    if scheme not in counts:
        raise ValueError(scheme)
    return round(counts[scheme] * size)


# %% right busiest: the messages counted one by one
def busiest(scheme, k, size):
    sends = [0] * k
    if scheme == "first":
        for other in range(1, k):
            sends[other] += size
            sends[0] += size
    elif scheme == "tree":
        gap = 1
        while gap < k:
            for low in range(0, k - gap, 2 * gap):
                sends[low] += size
                sends[low + gap] += size
            gap *= 2
    elif scheme == "ring":
        for _ in range(2 * (k - 1)):
            sends = [s + size // k for s in sends]
    else:
        raise ValueError(f"no scheme {scheme}")
    return max(sends)


# %% right busiest: match, and a loop for the rounds
def busiest(scheme, k, size):
    match scheme:
        case "first":
            return size * k - size
        case "tree":
            rounds, reached = 0, 1
            while reached < k:
                rounds, reached = rounds + 1, 2 * reached
            return rounds * size
        case "ring":
            return 2 * size - 2 * size // k
        case _:
            raise ValueError("first, tree or ring")


# %% wrong busiest loses busiest-care: the tree's rounds are rounded down | tree, k=3
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return int(np.log2(k)) * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)


# %% wrong busiest loses busiest-care: a part of a message | tree, k=3
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return np.log2(k) * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: tree doubled | tree: each of two devices
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return 2 * (k - 1).bit_length() * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: all devices' bytes | first: each of two
def busiest(scheme, k, size):
    if scheme in ("first", "tree", "ring"):
        return 2 * (k - 1) * size
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: half of the ring | ring: each of two
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return (k - 1).bit_length() * size
    if scheme == "ring":
        return (k - 1) * size // k
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: k messages for first | first: each of two
def busiest(scheme, k, size):
    if scheme == "first":
        return k * size
    if scheme == "tree":
        return (k - 1).bit_length() * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: right for k=2 | tree: device 0 sends to 2
def busiest(scheme, k, size):
    if scheme not in ("first", "tree", "ring"):
        raise ValueError(scheme)
    return size if k > 1 else 0


# %% wrong busiest loses busiest-values, busiest-care: another device than 0 | first, k=4
def busiest(scheme, k, size):
    if scheme == "first":
        return size if k > 1 else 0
    if scheme == "tree":
        return (k - 1).bit_length() * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: entries for bytes | first: each of two
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size * 4
    if scheme == "tree":
        return (k - 1).bit_length() * size * 4
    if scheme == "ring":
        return 2 * (k - 1) * size // k * 4
    raise ValueError(scheme)


# %% wrong busiest loses busiest-values, busiest-care: whole arrays in the ring | ring, k=4
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return (k - 1).bit_length() * size
    if scheme == "ring":
        return (k - 1) * size
    raise ValueError(scheme)


# %% wrong busiest loses busiest-care: whatever isn't first or tree is a ring | star: no ValueError
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return (k - 1).bit_length() * size
    return 2 * (k - 1) * size // k


# %% wrong busiest loses busiest-care: a tree for one device | tree: one device has nobody
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return max(1, (k - 1).bit_length()) * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)
