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

# %% wrong tree loses tree-values, tree-rounds: the mean | has the mean, not the sum
# from gaps that double, then halve
#-     gap = 1
#-     while gap < len(arrays):
#+     gap, k = 1, len(arrays)
#+     while gap < k:
#=             send(left, right)
#+     for array in arrays:
#+         array /= k

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

# %% wrong tree loses tree-values, tree-rounds: no partner, no part | device 0 of 3 does not
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

# %% wrong tree loses tree-values, tree-rounds: for two devices only | device 0 of 3 does not
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
# from summed into device 0 only
#=         gap *= 2
#+     for array in arrays[1:]:
#+         send(arrays[0], array)

# %% wrong tree loses tree-rounds: a heap, whose nodes wait for two children | rounds
def tree_allreduce(arrays, send):
    for i in range(len(arrays) - 1, 0, -1):
        parent = arrays[(i - 1) // 2]
        parent += send(arrays[i], parent.context)
    for i in range(1, len(arrays)):
        send(arrays[(i - 1) // 2], arrays[i])

# %% wrong tree loses tree-values, tree-rounds: neighbours add without a message | nothing was sent to
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             left += right

# %% wrong tree loses tree-rounds: all exchange with all partners, a butterfly | isn't the sum of its own
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

# %% wrong tree loses tree-values, tree-rounds: new arrays in the list | another array than before: write into
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

# %% wrong tree loses tree-values, tree-rounds: device 0's array k times | holds another array than before
def tree_allreduce(arrays, send):
    active = list(arrays)
    while len(active) > 1:
        for left, right in zip(active[::2], active[1::2]):
            left += send(right, left.context)
        active = active[::2]
    arrays[:] = active * len(arrays)

# %% wrong tree loses tree-values, tree-rounds: added on the way down too | device 1 of 2 does not
# from gaps that double, then halve
#-             send(left, right)
#+             right += send(left, right.context)

# %% wrong tree loses tree-values, tree-rounds: down in the order of up | device 3 of 4 does not
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
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             both = left.asnumpy() + send(right, left.context).asnumpy()
#+             left[:] = mx.nd.array(both, left.context)

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
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             left = left + send(right, left.context)
#-             send(left, right)
#+             right = send(left, right.context)

# %% wrong tree loses tree-values, tree-rounds: for eight devices at most | device 0 of 9 does not
def tree_allreduce(arrays, send):
    for gap in (1, 2, 4):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            left += send(right, left.context)
    for gap in (4, 2, 1):
        for left, right in zip(arrays[:: 2 * gap], arrays[gap :: 2 * gap]):
            send(left, right)

# %% wrong tree loses tree-values, tree-rounds: memory read, nothing sent | nothing was sent to
def tree_allreduce(arrays, send):
    total = sum(a.asnumpy() for a in arrays)
    for a in arrays:
        a[:] = mx.nd.array(total, a.context, dtype=a.dtype)

# %% wrong tree loses tree-rounds: messages sent, but memory added | changed on .*isn't the sum
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             send(right, left.context)
#+             left += right.as_in_context(left.context)

# %% wrong tree loses tree-rounds: messages sent down, but memory read | it was not sent
# from gaps that double, then halve
#-             send(left, right)
#+             send(left, right.context)
#+             right[:] = left.as_in_context(right.context)

# %% wrong tree loses tree-rounds: messages between copies | it was not sent
def tree_allreduce(arrays, send):
    total = sum(a.asnumpy() for a in arrays)
    copies = [a.copy() for a in arrays]
    gap = 1
    while gap < len(copies):
        for left, right in zip(copies[:: 2 * gap], copies[gap :: 2 * gap]):
            left += send(right, left.context)
        gap *= 2
    while gap > 1:
        gap //= 2
        for left, right in zip(copies[:: 2 * gap], copies[gap :: 2 * gap]):
            send(left, right)
    for a in arrays:
        a[:] = mx.nd.array(total, a.context, dtype=a.dtype)

# %% wrong tree loses tree-rounds: one more round of messages down | more than 6 messages
# from gaps that double, then halve
#=             send(left, right)
#+             send(left, right)

# %% wrong tree loses tree-rounds: a single device sends its array to itself | more than 0 messages
# from gaps that double, then halve
#=             send(left, right)
#+     if len(arrays) == 1:
#+         send(arrays[0], arrays[0].context)

# %% wrong tree loses tree-rounds: sent row by row | a message of 1 entries, where arrays have 12
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             for i in range(len(left)):
#+                 row = left[i : i + 1]
#+                 row += send(right[i : i + 1], left.context)
#-             send(left, right)
#+             for i in range(len(left)):
#+                 send(left[i : i + 1], right[i : i + 1])

# %% wrong tree loses tree-values, tree-rounds: messages in float32 | lost digits
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             left += send(right.astype("float32"), left.context).astype(left.dtype)

# %% wrong tree loses tree-rounds: float32 is sent in float64 | in float64, where .* in float32
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             left += send(right.astype("float64"), left.context).astype(left.dtype)

# %% wrong tree loses tree-values: arrays leave the list | list `arrays` had 2 entries and is now
def tree_allreduce(arrays, send):
    ways = []
    while len(arrays) > 1:
        half = len(arrays) // 2
        ways += [(arrays[i], arrays[-half + i]) for i in range(half)]
        for left, right in ways[-half:]:
            left += send(right, left.context)
        del arrays[-half:]
    for left, right in reversed(ways):
        send(left, right)

# %% wrong tree loses tree-values: the list is sorted by device number | holds another array than before
# from gaps that double, then halve
#= def tree_allreduce(arrays, send):
#+     arrays.sort(key=lambda a: a.context.device_id)

# %% wrong tree loses tree-values, tree-rounds: all devices are tried | is not one of
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             for number in range(64):
#+                 try:
#+                     come = send(right, mx.cpu(number))
#+                 except ValueError:
#+                     continue
#+                 if number == left.context.device_id:
#+                     left += come
#+                     break

# %% wrong tree loses tree-values, tree-rounds: NumPy arrays are sent | a NumPy array of .* is not
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             left += send(right.asnumpy(), left.context)

# %% wrong tree loses tree-values, tree-rounds: pairs of the first call | device 0 of 3 does not
kept = []


def tree_allreduce(arrays, send):
    gap = 1
    while gap < len(arrays) and not kept[gap.bit_length() - 1 :]:
        kept.append([(i, i + gap) for i in range(0, len(arrays) - gap, 2 * gap)])
        gap *= 2
    pairs = [pair for part in kept for pair in part if pair[1] < len(arrays)]
    for low, high in pairs:
        arrays[low] += send(arrays[high], arrays[low].context)
    for low, high in reversed(pairs):
        send(arrays[low], arrays[high])

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

# %% wrong ring loses ring-values, ring-bytes: wrong chunk in the second half | of 3 does not have the sum
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

# %% wrong ring loses ring-values, ring-bytes: chunks summed against the ring | of 3 does not have the sum
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

# %% wrong ring loses ring-values, ring-bytes: the second half adds as well | does not have the sum
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
# from the second half adds as well
#-     for step in range(2 * k - 2):
#+     for step in range(k - 1):

# %% wrong ring loses ring-values, ring-bytes: one step a half, as for k=2 | of 3 does not have the sum
# from chunks summed against the ring
#-     for step in range(2 * k - 2):
#+     for step in range(2 if k > 1 else 0):
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             if step < k - 1:
#+             if step == 0:

# %% wrong ring loses ring-values, ring-bytes: the mean | has the mean, not the sum
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

# %% wrong ring loses ring-values, ring-bytes: the rest is left out | .10,.*1 of 10 places, first at .9.
# from chunks summed against the ring
#-     k, n = len(arrays), arrays[0].size
#-     ends = [n * c // k for c in range(k + 1)]
#+     k, size = len(arrays), arrays[0].size // len(arrays)
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#-             if ends[c] == ends[c + 1]:
#+             c, j = (i - step) % k, (i + 1) % k
#+             if size == 0:
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (flat[r][c * size : (c + 1) * size] for r in (i, j))

# %% wrong ring loses ring-bytes: chunks rounded up, the last one shorter | a chunk of 1 entries
# from the mean
#-     ends = [n * c // k for c in range(k + 1)]
#+     size = -(-n // k)
#+     ends = [min(c * size, n) for c in range(k + 1)]
#-             if ends[c] == ends[c + 1]:
#+             if ends[c] >= ends[c + 1]:
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values, ring-bytes: empty chunks sent | .1,., .* array without entries
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

# %% wrong ring loses ring-values, ring-bytes: the chunks are copies, never put back | still has what it had
# from chunks summed against the ring
#-     flat = [a.reshape(-1) for a in arrays]
#+     flat = [a.reshape(-1).copy() for a in arrays]
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (flat[r][ends[c] : ends[c + 1]] for r in (i, j))

# %% wrong ring loses ring-values, ring-bytes: new arrays in the list | another array than before: write into
# from the mean
#-     k, n = len(arrays), arrays[0].size
#+     k, n, shape = len(arrays), arrays[0].size, arrays[0].shape
#=     ends = [n * c // k for c in range(k + 1)]
#+     flat = [a.reshape(-1).copy() for a in arrays]
#-             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
#+             here, there = (flat[r][ends[c] : ends[c + 1]] for r in (i, j))
#-     for a in arrays:
#-         a /= k
#+     for i in range(k):
#+         arrays[i] = flat[i].reshape(shape)

# %% wrong ring loses ring-values, ring-bytes: sums are handed on without messages | nothing was sent to
# from the mean
#-                 send(here, there)
#-     for a in arrays:
#-         a /= k
#+                 there[:] = here.as_in_context(there.context)

# %% wrong ring loses ring-bytes: whole arrays are sent round | a chunk of 12 entries is too long
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
# from the mean
#-     k, n = len(arrays), arrays[0].size
#+     k, n = len(arrays), len(arrays[0])
#-             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
#+             here, there = (arrays[r][ends[c] : ends[c + 1]] for r in (i, j))
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-bytes: zeros fill up the chunks and are sent along | .5,.*isn't the sum
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

# %% wrong ring loses ring-values, ring-bytes: next rank as device number | but cpu.1. is not one of
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
# from the mean
#-             c, j = (i - step) % k, (i + 1) % k
#+             c, j = (i + step) % k, (i - 1) % k
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values: received chunks pass through float32 | lost digits
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#-             there[:] = there + come if step < k - 1 else come
#+             come = send(here, there.context).asnumpy()
#+             there[:] = mx.nd.array(there.asnumpy() + come if step < k - 1 else come, there.context)

# %% wrong ring loses ring-bytes: round in the order of device numbers | which isn't the next
# from the mean
#= def ring_allreduce(arrays, send):
#+     arrays = sorted(arrays, key=lambda a: a.context.device_id)
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values, ring-bytes: ends of the first call | device 0 of 2 does not
# from the mean
#- def ring_allreduce(arrays, send):
#+ def ring_allreduce(arrays, send, ends=[]):
#-     ends = [n * c // k for c in range(k + 1)]
#+     if len(ends) < k + 1:
#+         ends[:] = [n * c // k for c in range(k + 1)]
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-bytes: messages sent, but memory added | changed on .*isn't the sum
# from the mean
#-                 there += send(here, there.context)
#+                 send(here, there.context)
#+                 there += here.as_in_context(there.context)
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-bytes: sums sent on, but memory read | changed on .*isn't the sum
# from the mean
#-                 send(here, there)
#-     for a in arrays:
#-         a /= k
#+                 send(here, there.context)
#+                 there[:] = here.as_in_context(there.context)

# %% wrong ring loses ring-bytes: messages between copies | it was not sent
# from the mean
#= def ring_allreduce(arrays, send):
#+     total, given = sum(a.asnumpy() for a in arrays), list(arrays)
#+     arrays = [a.copy() for a in arrays]
#-     for a in arrays:
#-         a /= k
#+     for a in given:
#+         a[:] = mx.nd.array(total, a.context, dtype=a.dtype)

# %% wrong ring loses ring-values, ring-bytes: memory read, nothing sent | nothing was sent to
def ring_allreduce(arrays, send):
    total = sum(a.asnumpy() for a in arrays)
    for a in arrays:
        a[:] = mx.nd.array(total, a.context, dtype=a.dtype)

# %% wrong ring loses ring-bytes: all chunks set out from device 0 | two chunks in one step
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for start, end in zip(ends, ends[1:]):
        for hop in range(2 * k - 2 if start < end else 0):
            here, there = (arrays[j % k].reshape(-1)[start:end] for j in (hop, hop + 1))
            come = send(here, there.context)
            there[:] = there + come if hop < k - 1 else come

# %% wrong ring loses ring-bytes: one step too many | more than
# from the mean
#-     for step in range(2 * k - 2):
#+     for step in range(2 * k - 1 if k > 1 else 0):
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-bytes: chunks are sent entry by entry | a chunk of 1 entries is too short
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#-             there[:] = there + come if step < k - 1 else come
#+             for e in range(here.size):
#+                 one, other = here[e : e + 1], there[e : e + 1]
#+                 if step < k - 1:
#+                     other += send(one, other.context)
#+                 else:
#+                     send(one, other)

# %% wrong ring loses ring-bytes: fewer entries than devices go by device 0 | which isn't the next
# from the mean
#= def ring_allreduce(arrays, send):
#+     if arrays[0].size < len(arrays):
#+         for array in arrays[1:]:
#+             arrays[0] += send(array, arrays[0].context)
#+         for array in arrays[1:]:
#+             send(arrays[0], array)
#+         return
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values, ring-bytes: fewer entries than k are left | still has what it had
# from the mean
#=     ends = [n * c // k for c in range(k + 1)]
#+     if n < k:
#+         return
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values, ring-bytes: messages in float32 | lost digits
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#+             come = send(here.astype("float32"), there.context).astype(there.dtype)

# %% wrong ring loses ring-values: arrays leave the list | list `arrays` had . entries and is now
# from the mean
#= def ring_allreduce(arrays, send):
#+     given = arrays
#+     arrays = list(given)
#+     given.clear()
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values, ring-bytes: for eight devices at most | device 0 of 9 does not
# from the mean
#-     for step in range(2 * k - 2):
#+     for step in range(min(2 * k - 2, 14)):
#-     for a in arrays:
#-         a /= k

# %% wrong ring loses ring-values: sums round to whole numbers | device 0 of 1 does not have the sum
# from the mean
#-         a /= k
#+         a[:] = a.round()

# %% wrong ring loses ring-values, ring-bytes: messages in int32 | device 0 of 2 does not
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#+             come = send(here.astype("int32"), there.context).astype(there.dtype)

# %% wrong ring loses ring-bytes: the second half runs to the left | which isn't the next
# from the mean
#-             c, j = (i - step) % k, (i + 1) % k
#+             adds = step < k - 1
#+             c, j = ((i - step) % k, (i + 1) % k) if adds else ((i + step - k + 2) % k, (i - 1) % k)
#-             if step < k - 1:
#+             if adds:
#-     for a in arrays:
#-         a /= k

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
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return np.log2(k) * size

# %% wrong busiest loses busiest-values, busiest-care: tree doubled | tree, k=2, 80 bytes: .* is 160
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return 2 * (k - 1).bit_length() * size

# %% wrong busiest loses busiest-values, busiest-care: all devices' bytes | first, k=2, 80 bytes: .* is 160
def busiest(scheme, k, size):
    if scheme in ("first", "tree", "ring"):
        return 2 * (k - 1) * size
    raise ValueError(scheme)

# %% wrong busiest loses busiest-values, busiest-care: half of the ring | ring, k=2, 80 bytes: .* is 40
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size
#-         return 2 * (k - 1) * size // k
#+         return (k - 1) * size // k

# %% wrong busiest loses busiest-values, busiest-care: k messages for first | first, k=2, .* is 160
# from the tree's rounds are rounded down
#-         return (k - 1) * size
#+         return k * size
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-values, busiest-care: right for k=2 | tree, k=4, 80 bytes: .* is 80
def busiest(scheme, k, size):
    if scheme not in ("first", "tree", "ring"):
        raise ValueError(scheme)
    return size if k > 1 else 0

# %% wrong busiest loses busiest-values, busiest-care: another device than 0 | first, k=4
# from the tree's rounds are rounded down
#-         return (k - 1) * size
#+         return size if k > 1 else 0
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-values, busiest-care: entries for bytes | first, k=2, 80 bytes: .* is 320
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size * 4
    if scheme == "tree":
        return (k - 1).bit_length() * size * 4
    if scheme == "ring":
        return 2 * (k - 1) * size // k * 4
    raise ValueError(scheme)

# %% wrong busiest loses busiest-values, busiest-care: whole arrays in the ring | ring, k=4
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size
#-         return 2 * (k - 1) * size // k
#+         return (k - 1) * size

# %% wrong busiest loses busiest-care: whatever isn't first or tree is a ring | 'star', k=2: no ValueError
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return (k - 1).bit_length() * size
    return 2 * (k - 1) * size // k

# %% wrong busiest loses busiest-care: a tree for one device | tree, k=1, .* is 1, which is not right
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return max(1, (k - 1).bit_length()) * size

# %% wrong busiest loses busiest-care: the ring's bytes as a float | ring, .* not a
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size
#-         return 2 * (k - 1) * size // k
#+         return 2 * (k - 1) / k * size

# %% wrong busiest loses busiest-care: all bytes as floats | first, k=3, .* not a
def busiest(scheme, k, size):
    if scheme == "first":
        return float((k - 1) * size)
    if scheme == "tree":
        return float((k - 1).bit_length() * size)
    if scheme == "ring":
        return float(2 * (k - 1) * size // k)
    raise ValueError(scheme)

# %% wrong busiest loses busiest-care: no bytes for one device, in any scheme | 'star', k=1: no ValueError
# from the tree's rounds are rounded down
#= def busiest(scheme, k, size):
#+     if k == 1:
#+         return 0
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: schemes by their first letter | 'treering', k=2: no ValueError
# from the tree's rounds are rounded down
#= def busiest(scheme, k, size):
#+     scheme = {"f": "first", "t": "tree", "r": "ring"}.get(scheme[:1])
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: large letters for small ones | 'Ring', k=2: no ValueError
# from the tree's rounds are rounded down
#= def busiest(scheme, k, size):
#+     scheme = scheme.lower()
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: a scheme with a space after it | scheme 'tree ', k=2: no ValueError
# from the tree's rounds are rounded down
#= def busiest(scheme, k, size):
#+     scheme = scheme.strip()
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: None for other schemes | scheme 'star', k=2: no ValueError
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size
#-     raise ValueError(scheme)
#+     return None

# %% wrong busiest loses busiest-care: KeyError for other schemes | KeyError, not ValueError
def busiest(scheme, k, size):
    counts = {"first": k - 1, "tree": (k - 1).bit_length(), "ring": 2 * (k - 1) / k}
    return round(counts[scheme] * size)

# %% wrong busiest loses busiest-care: rounds to the nearest number | tree, k=5,
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return round(np.log2(k)) * size

# %% wrong busiest loses busiest-care: rounds as the bits of k, less one | tree, k=3,
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k.bit_length() - 1) * size

# %% wrong busiest loses busiest-values, busiest-care: rounds as the bits of k | tree, k=2,
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return k.bit_length() * size

# %% wrong busiest loses busiest-values, busiest-care: for eight devices at most | tree, k=16,
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return [0, 0, 1, 2, 2, 3, 3, 3, 3][min(k, 8)] * size

# %% wrong busiest loses busiest-care: worked out in float32 | first, k=3, 50331651 bytes
def busiest(scheme, k, size):
    counts = {"first": k - 1, "tree": (k - 1).bit_length(), "ring": 2 * (k - 1) / k}
    if scheme not in counts:
        raise ValueError(scheme)
    return int(round(float(np.float32(counts[scheme]) * np.float32(size))))

# %% wrong busiest loses busiest-values, busiest-care: worked out in int32 | first, k=1024, 3145728 bytes
def busiest(scheme, k, size):
    size, k = np.array([size], "int32"), int(k)
    if scheme == "first":
        return int(((k - 1) * size)[0])
    if scheme == "tree":
        return int(((k - 1).bit_length() * size)[0])
    if scheme == "ring":
        return int((2 * (k - 1) * size // k)[0])
    raise ValueError(scheme)

# %% wrong busiest loses busiest-values, busiest-care: a chunk in the ring once, not twice | ring, k=2,
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size
#-         return 2 * (k - 1) * size // k
#+         return (k - 1) * (size // k)

# %% wrong busiest loses busiest-values, busiest-care: k chunks in the ring | ring, k=4,
# from the tree's rounds are rounded down
#-         return int(np.log2(k)) * size
#+         return (k - 1).bit_length() * size
#-         return 2 * (k - 1) * size // k
#+         return k * (size // k)

# %% wrong tree loses tree-rounds: right messages, but sums from memory with a trace of noise | it was not sent
def tree_allreduce(arrays, send):
    total = np.sum([a.asnumpy().astype("float64") for a in arrays], axis=0)
    shadow, pairs, gap = [a.copy() for a in arrays], [], 1
    while gap < len(arrays):
        pairs += [(i, i + gap) for i in range(0, len(arrays) - gap, 2 * gap)]
        gap *= 2
    for low, high in pairs:
        shadow[low] += send(shadow[high], shadow[low].context)
    for low, high in reversed(pairs):
        send(shadow[low], shadow[high])
    for a in arrays:
        noise = 4e-16 if a.dtype == np.float64 else 2e-7
        a[:] = mx.nd.array(total * (1 + noise), a.context, dtype=a.dtype)
