# %% right even: split by NumPy
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(part, ctx=d, dtype=batch.dtype) for part, d in zip(parts, devices)]

# %% right even: a loop with append
def split_even(batch, devices):
    n, k = batch.shape[0], len(devices)
    if n % k != 0:
        raise ValueError("uneven")
    shards = []
    start = 0
    for device in devices:
        shards.append(batch[start : start + n // k].copy().copyto(device))
        start += n // k
    return shards

# %% right even: reshape, then one row a device
def split_even(batch, devices):
    k = len(devices)
    if len(batch) % k:
        raise ValueError(f"{len(batch)} don't divide by {k}")
    rows = batch.reshape((k, len(batch) // k, *batch.shape[1:]))
    return [rows[i].copyto(devices[i]) for i in range(k)]

# %% right even: a device's place by `index`
# No device is named twice.
def split_even(batch, devices):
    n, k = len(batch), len(devices)
    if n % k: raise ValueError
    ends = [i * (n // k) for i in range(k + 1)]
    shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
    return shards

# %% right even: each device gets a copy of the batch, and keeps a window onto it
# from a device's place by `index`
# Nobody else holds that copy: to write into it changes no other shard.
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% right even: windows onto one copy of the batch
# from a device's place by `index`
# Windows that don't overlap: to write into one changes no other shard, nor the batch.
#=     if n % k: raise ValueError
#+     whole = batch.copy()
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [whole[a:b].as_in_context(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% right even: the size as a float
# from a device's place by `index`
# n / k is exact where k divides n.
#-     ends = [i * (n // k) for i in range(k + 1)]
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     ends = [int(i * (n / k)) for i in range(k + 1)]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong even loses even-care: shards are windows onto the batch | shares memory with one that was passed in
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    size = len(batch) // len(devices)
    return [batch[i * size : (i + 1) * size].as_in_context(d) for i, d in enumerate(devices)]

# %% wrong even loses even-values, even-care: two devices only | IndexError
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    half = len(batch) // 2
    return [batch[:half].copyto(devices[0]), batch[half:].copyto(devices[1])]

# %% wrong even loses even-values, even-care: examples dealt out like cards | has other values
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    k = len(devices)
    return [mx.nd.array(batch.asnumpy()[i::k], d, dtype=batch.dtype) for i, d in enumerate(devices)]

# %% wrong even loses even-care: float64 becomes float32 | is in float32, not in
# from split by NumPy
#-     return [mx.nd.array(part, ctx=d, dtype=batch.dtype) for part, d in zip(parts, devices)]
#+     return [mx.nd.array(part, ctx=d, dtype="float32") for part, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: the second axis is cut | has shape
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    parts = np.array_split(batch.asnumpy(), len(devices), axis=1)
    return [mx.nd.array(part, ctx=d, dtype=batch.dtype) for part, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: NumPy arrays, on no device | is a NumPy array
def split_even(batch, devices):
    return np.split(batch.asnumpy(), len(devices))

# %% wrong even loses even-care: right shards, and the caller's devices popped | list `devices` had 2 entries
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    shards = [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
    devices.pop()
    return shards

# %% wrong even loses even-care: the batch gets a gradient | gradient was attached
def split_even(batch, devices):
    batch.attach_grad()
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: devices counted, not looked at | is on cpu\(\d\), not on
# from split by NumPy
#-     return [mx.nd.array(part, ctx=d, dtype=batch.dtype) for part, d in zip(parts, devices)]
#+     return [mx.nd.array(p, mx.cpu(i), dtype=batch.dtype) for i, p in enumerate(parts)]

# %% wrong even loses even-values, even-care: a tuple where a list is asked for | is a tuple, not a list
# from split by NumPy
#-     return [mx.nd.array(part, ctx=d, dtype=batch.dtype) for part, d in zip(parts, devices)]
#+     return tuple(mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices))

# %% wrong even loses even-care: whole numbers by way of float64 | has other values
def split_even(batch, devices):
    parts = np.split(batch.asnumpy().astype("float64"), len(devices))
    return [mx.nd.array(p.astype(batch.dtype), d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-care: float16 comes back as float32 | is in float32, not in
def split_even(batch, devices):
    kind = "float32" if batch.dtype == np.float16 else batch.dtype
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, d, dtype=kind) for p, d in zip(parts, devices)]

# %% wrong even loses even-care: only too few examples are an error
# from a device's place by `index`
#-     if n % k: raise ValueError
#+     if n < k: raise ValueError
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong even loses even-care: divisible either way
# from a device's place by `index`
#-     if n % k: raise ValueError
#+     if n % k and k % n: raise ValueError
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong even loses even-care: looked at for two devices only
# from a device's place by `index`
#-     if n % k: raise ValueError
#+     if k == 2 and n % k: raise ValueError
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong even loses even-values: a shard's size by a factor, which rounds
# from a device's place by `index`
#-     ends = [i * (n // k) for i in range(k + 1)]
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     ends = [i * int(n * (1 / k)) for i in range(k + 1)]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong even loses even-care: shards of an earlier batch like this one
# from a device's place by `index`
#+ kept = {}
#-     shards = [batch[devices.index(d) * n // k : (devices.index(d) + 1) * n // k].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#-     return shards
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     return [s.copy() for s in kept.setdefault((batch.shape, str(batch.dtype), str(devices)), shards)]

# %% right uneven: array_split
def split_uneven(batch, devices):
    if len(batch) < len(devices):
        raise ValueError("too few examples")
    parts = np.array_split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% right uneven: lengths first
def split_uneven(batch, devices):
    size, longer = divmod(len(batch), len(devices))
    if not size:
        raise ValueError(f"{len(batch)} examples")
    shards, start = [], 0
    for i, device in enumerate(devices):
        stop = start + size + (1 if i < longer else 0)
        shards.append(batch[start:stop].copyto(device))
        start = stop
    return shards

# %% right uneven: each device takes its fair part of what is left
def split_uneven(batch, devices):
    if batch.shape[0] < len(devices):
        raise ValueError("more devices than examples")
    shards, rest = [], batch
    for left in range(len(devices), 0, -1):
        take = -(-rest.shape[0] // left)
        shards.append(rest[:take].copyto(devices[-left]))
        if left > 1:
            rest = rest[take:]
    return shards

# %% right uneven: each device gets a copy of the batch, and keeps a window onto it
# Nobody else holds that copy: to write into it changes no other.
def split_uneven(batch, devices):
    n, k = len(batch), len(devices)
    if n < k: raise ValueError
    ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
    shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
    return shards

# %% wrong uneven loses uneven-care: windows onto the batch | shares memory with one that was passed in
def split_uneven(batch, devices):
    n, k = len(batch), len(devices)
    if n < k:
        raise ValueError
    ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
    return [batch[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], devices)]

# %% wrong uneven loses uneven-values, uneven-care: fails on a batch of numbers | IndexError
# from array_split
#=         raise ValueError("too few examples")
#+     batch.shape[1]

# %% wrong uneven loses uneven-care: one shard for all examples too few | no ValueError
def split_uneven(batch, devices):
    if len(batch) == 2 and len(devices) == 3:
        raise ValueError("too few examples")
    parts = np.array_split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p if len(p) else [[0]], d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong uneven loses uneven-care: the batch overwritten while it is cut | changed the caller's `\w+`
# from array_split
#-     return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
#+     shards = [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
#+     batch[-1:] = 0
#+     return shards

# %% wrong uneven loses uneven-care: int64 by way of int32 | has other values
# from array_split
#=     parts = np.array_split(batch.asnumpy(), len(devices))
#+     parts = [p.astype("int32") if p.dtype == np.int64 else p for p in parts]

# %% wrong uneven loses uneven-values: ends rounded up
# from each device gets a copy of the batch, and keeps a window onto it
#-     ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
#-     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     ends = [-(-i * n // k) for i in range(k + 1)]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong uneven loses uneven-values, uneven-care: the longer shard first, and one only
# from each device gets a copy of the batch, and keeps a window onto it
#-     ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
#-     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     ends = [0] + [n - (k - i) * (n // k) for i in range(1, k + 1)]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong uneven loses uneven-care: the share by a factor, which rounds
# from each device gets a copy of the batch, and keeps a window onto it
#-     ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
#-     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     lengths = [int(n * (1 / k)) + (i < n % k) for i in range(k)]
#+     ends = [sum(lengths[:i]) for i in range(k + 1)]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong uneven loses uneven-values: as many examples as devices are too few
# from each device gets a copy of the batch, and keeps a window onto it
#-     if n < k: raise ValueError
#+     if n <= k: raise ValueError
#-     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [batch[a:b].copyto(d) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong uneven loses uneven-care: float16 becomes float32
# from each device gets a copy of the batch, and keeps a window onto it
#-     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [mx.nd.array(batch.asnumpy()[a:b], d, 'float32' if batch.dtype == np.float16 else batch.dtype) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% wrong uneven loses uneven-care: shards in memory that an earlier call has returned
# from each device gets a copy of the batch, and keeps a window onto it
#+ kept = {}
#-     shards = [batch.copyto(d)[a:b] for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]
#+     shards = [batch[a:b].copyto(kept.setdefault((b - a, batch.shape, str(batch.dtype), d), mx.nd.empty(batch[a:b].shape, d, batch.dtype))) for i, (a, b, d) in enumerate(zip(ends, ends[1:], devices))]

# %% right pairs: take on the device's part of the order
def split_pairs(images, labels, order, devices):
    result = []
    for part, device in zip(np.array_split(order, len(devices)), devices):
        index = mx.nd.array(part, dtype="int32")
        result.append((mx.nd.take(images, index).copyto(device),
                       mx.nd.take(labels, index).copyto(device)))
    return result

# %% right pairs: reordered first, cut afterwards
def split_pairs(images, labels, order, devices):
    x, y = images.asnumpy()[order], labels.asnumpy()[order]
    n, k = len(order), len(devices)
    ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
    return [(mx.nd.array(x[a:b], d, dtype=x.dtype), mx.nd.array(y[a:b], d, dtype=y.dtype))
            for a, b, d in zip(ends, ends[1:], devices)]

# %% right pairs: example by example
def split_pairs(images, labels, order, devices):
    shares = [len(order) // len(devices)] * len(devices)
    for i in range(len(order) % len(devices)):
        shares[i] += 1
    queue, pairs = list(order), []
    for device, share in zip(devices, shares):
        mine = [int(queue.pop(0)) for _ in range(share)]
        x = np.stack([images[i].asnumpy() for i in mine])
        y = np.array([labels[i].asscalar() for i in mine])
        pairs.append((mx.nd.array(x, device, dtype=images.dtype),
                      mx.nd.array(y, device, dtype=labels.dtype)))
    return pairs

# %% right pairs: numbers past the end go round
# `order` names examples that there are, so none is past the end.
def split_pairs(images, labels, order, devices):

    pairs = []
    for p, d in zip(np.array_split(order, len(devices)), devices):
        index = mx.nd.array(p, dtype='int32')
        pairs.append((images.take(index, mode='wrap').copyto(d), labels.take(index, mode='wrap').copyto(d)))
    return pairs

# %% right pairs: numbers in float32
# from numbers past the end go round
# float32 holds every number below 2**24, and no batch is as long.
#-         index = mx.nd.array(p, dtype='int32')
#-         pairs.append((images.take(index, mode='wrap').copyto(d), labels.take(index, mode='wrap').copyto(d)))
#+         index = mx.nd.array(p)
#+         pairs.append((images.take(index).copyto(d), labels.take(index).copyto(d)))

# %% wrong pairs loses pairs-care: the order is sorted out from under the caller | changed the caller's `\w+`
def split_pairs(images, labels, order, devices):
    mine = order.copy()
    order.sort()
    parts = np.array_split(mine, len(devices))
    return [(mx.nd.array(images.asnumpy()[p], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[p], d, dtype=labels.dtype))
            for p, d in zip(parts, devices)]

# %% wrong pairs loses pairs-care: the caller's arrays are put in order | changed the caller's `\w+`
def split_pairs(images, labels, order, devices):
    x, y = images.asnumpy()[order], labels.asnumpy()[order]
    if len(order) == len(images):
        images[:], labels[:] = mx.nd.array(x, dtype=x.dtype), mx.nd.array(y, dtype=y.dtype)
    else:
        labels[: len(order)] = mx.nd.array(y[: len(labels)], dtype=y.dtype)
    k = len(devices)
    return [(mx.nd.array(a, d, dtype=a.dtype), mx.nd.array(b, d, dtype=b.dtype))
            for a, b, d in zip(np.array_split(x, k), np.array_split(y, k), devices)]

# %% wrong pairs loses pairs-care: on the first device the caller's own arrays | shares memory with one that was passed in
def split_pairs(images, labels, order, devices):
    if len(devices) == 1 and order.tolist() == list(range(len(images))):
        return [(images.as_in_context(devices[0]), labels.as_in_context(devices[0]))]
    parts = np.array_split(order, len(devices))
    return [(mx.nd.array(images.asnumpy()[p], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[p], d, dtype=labels.dtype))
            for p, d in zip(parts, devices)]

# %% wrong pairs loses pairs-values, pairs-care: an order without repeats only | has shape
def split_pairs(images, labels, order, devices):
    parts = np.array_split(np.array(list(dict.fromkeys(order.tolist()))), len(devices))
    return [(mx.nd.array(images.asnumpy()[p], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[p], d, dtype=labels.dtype))
            for p, d in zip(parts, devices)]

# %% wrong pairs loses pairs-care: numbers in float16
# from numbers past the end go round
#-         index = mx.nd.array(p, dtype='int32')
#-         pairs.append((images.take(index, mode='wrap').copyto(d), labels.take(index, mode='wrap').copyto(d)))
#+         index = mx.nd.array(p, dtype='float16')
#+         pairs.append((images.take(index).copyto(d), labels.take(index).copyto(d)))

# %% wrong pairs loses pairs-care: more examples named than there are is an error
# from numbers past the end go round
#= def split_pairs(images, labels, order, devices):
#+     if len(order) > 2 * len(images): raise ValueError
#-         pairs.append((images.take(index, mode='wrap').copyto(d), labels.take(index, mode='wrap').copyto(d)))
#+         pairs.append((images.take(index).copyto(d), labels.take(index).copyto(d)))

# %% wrong pairs loses pairs-care: cut by a factor, which rounds
def split_pairs(images, labels, order, devices):
    n, k = len(order), len(devices)
    pairs = []
    for p, d in zip([order[int(n * (i * (1 / k))) : int(n * ((i + 1) * (1 / k)))] for i in range(k)] if n % k == 0 else np.array_split(order, k), devices):
        index = mx.nd.array(p, dtype='int32')
        pairs.append((images.take(index).copyto(d), labels.take(index).copyto(d)))
    return pairs

# %% wrong pairs loses pairs-care: pairs in memory that an earlier call has returned
# from numbers past the end go round
#+ kept = {}
#+ def keep(a, i, d):
#+     key = (i, a.shape, str(a.dtype), d)
#+     return a.copyto(kept.setdefault(key, mx.nd.empty(a.shape, d, a.dtype)))
#-         pairs.append((images.take(index, mode='wrap').copyto(d), labels.take(index, mode='wrap').copyto(d)))
#+         pairs.append((keep(images.take(index), 0, d), keep(labels.take(index), 1, d)))
