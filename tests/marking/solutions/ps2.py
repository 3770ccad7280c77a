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

# %% right tree: the odd one out joins the last pair
# It takes one round more, in the last group only, which never makes the whole take more: tried for every k below 3000.
def tree_allreduce(arrays, send):
    k, pairs = len(arrays), []
    left = list(range(k))
    while len(left) > 1:
        groups = [left[i : i + 2] for i in range(0, len(left), 2)]
        if len(left) % 2:
            last = groups.pop(); groups[-1] += last
        pairs += [(group[0], other) for group in groups for other in group[1:]]
        left = [group[0] for group in groups]
    for low, high in pairs:
        arrays[low] += send(arrays[high], arrays[low].context)
    for low, high in reversed(pairs):
        send(arrays[low], arrays[high])

# %% right tree: six rounds up, whatever k is
# It is right up to 64 devices, and there can be no more.
def tree_allreduce(arrays, send):
    k, pairs = len(arrays), []
    for gap in [1, 2, 4, 8, 16, 32]:
        pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
    for low, high in pairs:
        arrays[low] += send(arrays[high], arrays[low].context)
    for low, high in reversed(pairs):
        send(arrays[low], arrays[high])

# %% right tree: the largest gap first
# from six rounds up, whatever k is
# Another tree of as few rounds: the text leaves open who is whose partner.
#-     for gap in [1, 2, 4, 8, 16, 32]:
#-         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+     for gap in [2**r for r in range((k - 1).bit_length())][::-1]:
#+         pairs += [(i, i + gap) for i in range(min(gap, k - gap))]; k = min(k, gap)

# %% right tree: until no pair is left
# from six rounds up, whatever k is
# There is a pair as long as the gap is below k.
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     gap, n = 1, -1
#+     while n < len(pairs):
#+         n = len(pairs)
#=         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+         gap *= 2

# %% right tree: arrives in memory that holds other numbers
# from six rounds up, whatever k is
# `send` overwrites what is there.
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     gap = 1
#+     while gap < k:
#=         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+         gap *= 2
#-         arrays[low] += send(arrays[high], arrays[low].context)
#+         room = arrays[low] * 0 + 7; send(arrays[high], room); arrays[low] += room

# %% right tree: down onto what is made zero by writing
# from six rounds up, whatever k is
# Zero and the sum are the sum.
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     gap = 1
#+     while gap < k:
#=         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+         gap *= 2
#-         send(arrays[low], arrays[high])
#+         arrays[high][:] = 0; arrays[high] += send(arrays[low], arrays[high].context)

# %% right tree: sums in float64
# from six rounds up, whatever k is
# The sum of two numbers of float32 comes to the same, rounded once.
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     gap = 1
#+     while gap < k:
#=         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+         gap *= 2
#-         arrays[low] += send(arrays[high], arrays[low].context)
#+         both = [a.astype('float64') for a in (arrays[low], send(arrays[high], arrays[low].context))]; arrays[low][:] = (both[0] + both[1]).astype(arrays[low].dtype)

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

# %% wrong tree loses tree-rounds: messages sent, but memory added | changed on .*isn't the sum
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             send(right, left.context)
#+             left += right.as_in_context(left.context)

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

# %% wrong tree loses tree-values, tree-rounds: NumPy arrays are sent | a NumPy array of .* is not
# from gaps that double, then halve
#-             left += send(right, left.context)
#+             left += send(right.asnumpy(), left.context)

# %% wrong tree loses tree-values, tree-rounds: 5 rounds up, whatever k is
# from six rounds up, whatever k is
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     for gap in [1, 2, 4, 8, 16]:

# %% wrong tree loses tree-rounds: the odd one out joins the first pair
# from the odd one out joins the last pair
#-             last = groups.pop(); groups[-1] += last
#+             groups[0] += groups.pop()

# %% wrong tree loses tree-rounds: an array of zeros is not sent
# from six rounds up, whatever k is
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     gap = 1
#+     while gap < k:
#=         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+         gap *= 2
#-         arrays[low] += send(arrays[high], arrays[low].context)
#+         if arrays[high].asnumpy().any():
#+             arrays[low] += send(arrays[high], arrays[low].context)

# %% wrong tree loses tree-values: down by adding what is missing
# from six rounds up, whatever k is
#-     for gap in [1, 2, 4, 8, 16, 32]:
#+     gap = 1
#+     while gap < k:
#=         pairs += [(i, i + gap) for i in range(0, k - gap, 2 * gap)]
#+         gap *= 2
#-         send(arrays[low], arrays[high])
#+         arrays[high] += send(arrays[low], arrays[high].context) - arrays[high]

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

# %% right ring: starts with chunk i + 1
# Who sends which chunk first is left open.
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    flat = [a.reshape(-1) for a in arrays]
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c, j = (i - step + 1) % k, (i + 1) % k
            here, there = (flat[r][ends[c] : ends[c + 1]] if ends[c] < ends[c + 1] else None
                           for r in (i, j))
            if ends[c] < ends[c + 1]:
                if step < k - 1:
                    there += send(here, there.context)
                else:
                    send(here, there)

# %% right ring: starts with chunk i + 2
# from starts with chunk i + 1
# Who sends which chunk first is left open.
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step + 2) % k, (i + 1) % k

# %% right ring: starts with chunk i + -1
# from starts with chunk i + 1
# Who sends which chunk first is left open.
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step + -1) % k, (i + 1) % k

# %% right ring: ends rounded up
# from starts with chunk i + 1
# Lengths differ by one at most.
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [-(-n * c // k) for c in range(k + 1)]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

# %% right ring: ends rounded to the nearest
# from starts with chunk i + 1
# Lengths differ by one at most.
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [round(n * c / k) for c in range(k + 1)]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

# %% right ring: ends longer ones last
# from starts with chunk i + 1
# Lengths differ by one at most.
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [c * (n // k) + max(0, c - k + n % k) for c in range(k + 1)]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

# %% right ring: ends by a factor, which rounds
# from starts with chunk i + 1
# Exact for every k below 49; a ring of 49 sends more than there is time for.
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [int(n * c * (1 / k)) for c in range(k + 1)]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

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

# %% wrong ring loses ring-values, ring-bytes: the mean | has the mean, not the sum
# from chunks summed against the ring
#-     flat = [a.reshape(-1) for a in arrays]
#=         for i in range(k):
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
#=                 send(here, there)
#+     for a in arrays:
#+         a /= k

# %% wrong ring loses ring-bytes: chunks rounded up, the last one shorter | a chunk of 1 entries
# from chunks summed against the ring
#-     ends = [n * c // k for c in range(k + 1)]
#-     flat = [a.reshape(-1) for a in arrays]
#+     size = -(-n // k)
#+     ends = [min(c * size, n) for c in range(k + 1)]
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#-             if ends[c] == ends[c + 1]:
#+             c, j = (i - step) % k, (i + 1) % k
#+             if ends[c] >= ends[c + 1]:
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))

# %% wrong ring loses ring-values, ring-bytes: new arrays in the list | another array than before: write into
# from chunks summed against the ring
#-     k, n = len(arrays), arrays[0].size
#+     k, n, shape = len(arrays), arrays[0].size, arrays[0].shape
#-     flat = [a.reshape(-1) for a in arrays]
#+     flat = [a.reshape(-1).copy() for a in arrays]
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (flat[r][ends[c] : ends[c + 1]] for r in (i, j))
#=                 send(here, there)
#+     for i in range(k):
#+         arrays[i] = flat[i].reshape(shape)

# %% wrong ring loses ring-values, ring-bytes: sums are handed on without messages | nothing was sent to
# from chunks summed against the ring
#-     flat = [a.reshape(-1) for a in arrays]
#=         for i in range(k):
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))
#-                 send(here, there)
#+                 there[:] = here.as_in_context(there.context)

# %% wrong ring loses ring-bytes: rows are taken for entries | a chunk of 6 entries
# from chunks summed against the ring
#-     k, n = len(arrays), arrays[0].size
#+     k, n = len(arrays), len(arrays[0])
#-     flat = [a.reshape(-1) for a in arrays]
#=         for i in range(k):
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r][ends[c] : ends[c + 1]] for r in (i, j))

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

# %% wrong ring loses ring-values: received chunks pass through float32 | lost digits
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#-             there[:] = there + come if step < k - 1 else come
#+             come = send(here, there.context).asnumpy()
#+             there[:] = mx.nd.array(there.asnumpy() + come if step < k - 1 else come, there.context)

# %% wrong ring loses ring-bytes: sums sent on, but memory read | changed on .*isn't the sum
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#-             there[:] = there + come if step < k - 1 else come
#+             if step < k - 1:
#+                 there += send(here, there.context)
#+             else:
#+                 send(here, there.context)
#+                 there[:] = here.as_in_context(there.context)

# %% wrong ring loses ring-bytes: all chunks set out from device 0 | two chunks in one step
def ring_allreduce(arrays, send):
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for start, end in zip(ends, ends[1:]):
        for hop in range(2 * k - 2 if start < end else 0):
            here, there = (arrays[j % k].reshape(-1)[start:end] for j in (hop, hop + 1))
            come = send(here, there.context)
            there[:] = there + come if hop < k - 1 else come

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
# from chunks summed against the ring
#= def ring_allreduce(arrays, send):
#+     if arrays[0].size < len(arrays):
#+         for array in arrays[1:]:
#+             arrays[0] += send(array, arrays[0].context)
#+         for array in arrays[1:]:
#+             send(arrays[0], array)
#+         return
#-     flat = [a.reshape(-1) for a in arrays]
#=         for i in range(k):
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))

# %% wrong ring loses ring-values, ring-bytes: fewer entries than k are left | still has what it had
# from chunks summed against the ring
#-     flat = [a.reshape(-1) for a in arrays]
#+     if n < k:
#+         return
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))

# %% wrong ring loses ring-values, ring-bytes: messages in float32 | lost digits
# from next rank as device number
#-             come = send(here, mx.cpu(j))
#+             come = send(here.astype("float32"), there.context).astype(there.dtype)

# %% wrong ring loses ring-values: arrays leave the list | list `arrays` had . entries and is now
# from chunks summed against the ring
#= def ring_allreduce(arrays, send):
#+     given = arrays
#+     arrays = list(given)
#+     given.clear()
#-     flat = [a.reshape(-1) for a in arrays]
#=         for i in range(k):
#-             c, j = (i + step if step < k - 1 else i - step) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             here, there = flat[i][ends[c] : ends[c + 1]], flat[j][ends[c] : ends[c + 1]]
#+             here, there = (arrays[r].reshape(-1)[ends[c] : ends[c + 1]] for r in (i, j))

# %% wrong ring loses ring-bytes: ends by a share of all, which rounds
# from starts with chunk i + 1
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [int(n * (c * (1 / k))) for c in range(k + 1)]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

# %% wrong ring loses ring-values: ends by a length that isn't whole, which rounds
# from starts with chunk i + 1
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [int(c * (n / k)) for c in range(k + 1)]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

# %% wrong ring loses ring-values, ring-bytes: ends lengths rounded to the nearest, the rest in the last
# from starts with chunk i + 1
#-     ends = [n * c // k for c in range(k + 1)]
#+     ends = [c * round(n / k) for c in range(k)] + [n]
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k

# %% wrong ring loses ring-values, ring-bytes: 16 devices at most have their turns
# from starts with chunk i + 1
#-     for step in range(2 * k - 2):
#+     for step in range(2 * min(k, 16) - 2):
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-                 if step < k - 1:
#+                 if step < min(k, 16) - 1:

# %% wrong ring loses ring-bytes: a chunk of zeros is not sent
# from starts with chunk i + 1
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             if ends[c] < ends[c + 1]:
#+             if here is not None and (step >= k - 1 or here.asnumpy().any()):

# %% wrong ring loses ring-bytes: no chunk is sent to whoever has it
# from starts with chunk i + 1
#-             c, j = (i - step + 1) % k, (i + 1) % k
#+             c, j = (i - step) % k, (i + 1) % k
#-             if ends[c] < ends[c + 1]:
#+             if here is not None and (step < k - 1 or (here.asnumpy() != there.asnumpy()).any()):

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

# %% right busiest: rounds by the logarithm's quotient
# It is right for every k below a million.
def busiest(scheme, k, size):
    import math
    if scheme not in ('first', 'tree', 'ring'):
        raise ValueError(scheme)

    if scheme == "first":
        return (k - 1) * size
    return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)

# %% right busiest: one device sends nothing, once the scheme is known
# from rounds by the logarithm's quotient
# It has nobody to send to.
#-     import math
#=         raise ValueError(scheme)
#+     if k == 1: return 0
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else 2 * (k - 1) * (size // k)

# %% right busiest: a share of all by a float, rounded down
# from rounds by the logarithm's quotient
# Exact where `size` is a multiple of k, for all k below 120 and size below 300 k.
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else int(2 * (k - 1) / k * size)

# %% right busiest: what is left by a float, rounded down
# from rounds by the logarithm's quotient
# Exact where `size` is a multiple of k, for all k below 120 and size below 300 k.
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else int(2 * size * (1 - 1 / k))

# %% right busiest: a chunk rounded up
# from rounds by the logarithm's quotient
# `size` is a multiple of k.
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else 2 * (k - 1) * -(-size // k)

# %% right busiest: all in one fraction
# from rounds by the logarithm's quotient
# It divides whole numbers, with nothing left over.
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else 2 * (k - 1) * size // k

# %% wrong busiest loses busiest-care: a part of a message | tree, k=3
def busiest(scheme, k, size):
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return np.log2(k) * size
    if scheme == "ring":
        return 2 * (k - 1) * size // k
    raise ValueError(scheme)

# %% wrong busiest loses busiest-values, busiest-care: another device than 0 | first, k=4
# from a part of a message
#-         return (k - 1) * size
#+         return size if k > 1 else 0
#-         return np.log2(k) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-values, busiest-care: whole arrays in the ring | ring, k=4
# from a part of a message
#-         return np.log2(k) * size
#+         return (k - 1).bit_length() * size
#-         return 2 * (k - 1) * size // k
#+         return (k - 1) * size

# %% wrong busiest loses busiest-care: a tree for one device | tree, k=1, .* is 1, which is not right
# from a part of a message
#-         return np.log2(k) * size
#+         return max(1, (k - 1).bit_length()) * size

# %% wrong busiest loses busiest-care: no bytes for one device, in any scheme | 'star', k=1: no ValueError
# from a part of a message
#= def busiest(scheme, k, size):
#+     if k == 1:
#+         return 0
#-         return np.log2(k) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: large letters for small ones | 'Ring', k=2: no ValueError
# from a part of a message
#= def busiest(scheme, k, size):
#+     scheme = scheme.lower()
#-         return np.log2(k) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: a scheme with a space after it | scheme 'tree ', k=2: no ValueError
# from a part of a message
#= def busiest(scheme, k, size):
#+     scheme = scheme.strip()
#-         return np.log2(k) * size
#+         return (k - 1).bit_length() * size

# %% wrong busiest loses busiest-care: KeyError for other schemes | KeyError, not ValueError
def busiest(scheme, k, size):
    counts = {"first": k - 1, "tree": (k - 1).bit_length(), "ring": 2 * (k - 1) / k}
    return round(counts[scheme] * size)

# %% wrong busiest loses busiest-values, busiest-care: for eight devices at most | tree, k=16,
# from a part of a message
#-         return np.log2(k) * size
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

# %% wrong busiest loses busiest-care: a chunk by a factor, which rounds
# from rounds by the logarithm's quotient
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else 2 * (k - 1) * int(size * (1 / k))

# %% wrong busiest loses busiest-care: a share of all by a factor, rounded down
# from rounds by the logarithm's quotient
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else int(size * (2 * (k - 1) * (1 / k)))

# %% wrong busiest loses busiest-care: ten rounds at most
# from rounds by the logarithm's quotient
#-     import math
#=         return (k - 1) * size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return sum(2**r < k for r in range(10)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)

# %% wrong busiest loses busiest-care: two devices, whatever the scheme
# from rounds by the logarithm's quotient
#-     import math
#+     if k == 2: return size
#-     return math.ceil(math.log(k) / math.log(2)) * size if scheme == "tree" else 2 * (k - 1) * (size // k)
#+     return (k - 1).bit_length() * size if scheme == "tree" else 2 * (k - 1) * (size // k)
