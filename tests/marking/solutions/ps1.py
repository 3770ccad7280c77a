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

# %% wrong even loses even-care: shards are windows onto the batch | shares memory with one that was passed in
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    size = len(batch) // len(devices)
    return [batch[i * size : (i + 1) * size].as_in_context(d) for i, d in enumerate(devices)]

# %% wrong even loses even-values, even-care: all on the first device | is on cpu\(\d\), not on
# from shards are windows onto the batch
#-     return [batch[i * size : (i + 1) * size].as_in_context(d) for i, d in enumerate(devices)]
#+     return [batch[i * size : (i + 1) * size].copyto(devices[0]) for i in range(len(devices))]

# %% wrong even loses even-values, even-care: every device gets the first shard | has other values
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    return [batch[: len(batch) // len(devices)].copyto(d) for d in devices]

# %% wrong even loses even-values, even-care: two devices only | IndexError
# from every device gets the first shard
#-     return [batch[: len(batch) // len(devices)].copyto(d) for d in devices]
#+     half = len(batch) // 2
#+     return [batch[:half].copyto(devices[0]), batch[half:].copyto(devices[1])]

# %% wrong even loses even-care: the tail is dropped in silence | no ValueError
def split_even(batch, devices):
    size = len(batch) // len(devices)
    return [batch[i * size : (i + 1) * size].copyto(d) for i, d in enumerate(devices)]

# %% wrong even loses even-values, even-care: examples dealt out like cards | has other values
# from every device gets the first shard
#-     return [batch[: len(batch) // len(devices)].copyto(d) for d in devices]
#+     k = len(devices)
#+     return [mx.nd.array(batch.asnumpy()[i::k], d, dtype=batch.dtype) for i, d in enumerate(devices)]

# %% wrong even loses even-care: float64 becomes float32 | is in float32, not in
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(part, ctx=d, dtype="float32") for part, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: the second axis is cut | has shape
# from every device gets the first shard
#-     return [batch[: len(batch) // len(devices)].copyto(d) for d in devices]
#+     parts = np.array_split(batch.asnumpy(), len(devices), axis=1)
#+     return [mx.nd.array(part, ctx=d, dtype=batch.dtype) for part, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: NumPy arrays, on no device | is a NumPy array
def split_even(batch, devices):
    return np.split(batch.asnumpy(), len(devices))

# %% wrong even loses even-values, even-care: right for the visible example only | has shape
# from shards are windows onto the batch
#-     return [batch[i * size : (i + 1) * size].as_in_context(d) for i, d in enumerate(devices)]
#+     shards = [mx.nd.arange(size * i * 2, size * (i + 1) * 2).reshape((size, 2)) for i in range(2)]
#+     return [s.astype(batch.dtype).copyto(d) for s, d in zip(shards, devices)]

# %% wrong even loses even-care: one example too few is an error of its own kind | \w+, not ValueError
# from the tail is dropped in silence
#= def split_even(batch, devices):
#+     if len(batch) % len(devices):
#+         raise Exception("uneven")

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

# %% wrong uneven loses uneven-values, uneven-care: the tail is dropped | has shape
def split_uneven(batch, devices):
    size = len(batch) // len(devices)
    if not size:
        raise ValueError
    return [batch[i * size : (i + 1) * size].copyto(d) for i, d in enumerate(devices)]

# %% wrong uneven loses uneven-values, uneven-care: the whole remainder on the last device | has shape
def split_uneven(batch, devices):
    size, k = len(batch) // len(devices), len(devices)
    if not size:
        raise ValueError
    ends = [i * size for i in range(k)] + [len(batch)]
    return [batch[a:b].copyto(d) for a, b, d in zip(ends, ends[1:], devices)]

# %% wrong uneven loses uneven-values, uneven-care: shards of equal size, rounded up | has shape
def split_uneven(batch, devices):
    size = -(-len(batch) // len(devices))
    return [batch[i * size : (i + 1) * size].copyto(d) for i, d in enumerate(devices)]

# %% wrong uneven loses uneven-values, uneven-care: longer shards last | has shape
def split_uneven(batch, devices):
    n, k = len(batch), len(devices)
    if n < k:
        raise ValueError
    ends = [n * i // k for i in range(k + 1)]
    return [batch[a:b].copyto(d) for a, b, d in zip(ends, ends[1:], devices)]

# %% wrong uneven loses uneven-values, uneven-care: one example counted twice at each seam | has shape
def split_uneven(batch, devices):
    n, k = len(batch), len(devices)
    if n < k:
        raise ValueError
    ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
    return [batch[max(a - 1, 0) : b].copyto(d) for a, b, d in zip(ends, ends[1:], devices)]

# %% wrong uneven loses uneven-care: an empty shard in place of an error | no ValueError
def split_uneven(batch, devices):
    parts = np.array_split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p if len(p) else batch.asnumpy()[:1], d, dtype=batch.dtype)
            for p, d in zip(parts, devices)]

# %% wrong uneven loses uneven-care: windows onto the batch | shares memory with one that was passed in
# from one example counted twice at each seam
#-     return [batch[max(a - 1, 0) : b].copyto(d) for a, b, d in zip(ends, ends[1:], devices)]
#+     return [batch[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], devices)]

# %% wrong uneven loses uneven-values, uneven-care: right shards, devices in another order | is on cpu\(\d\), not on
# from one example counted twice at each seam
#-     return [batch[max(a - 1, 0) : b].copyto(d) for a, b, d in zip(ends, ends[1:], devices)]
#+     ordered = sorted(devices, key=lambda d: d.device_id)
#+     return [batch[a:b].copyto(d) for a, b, d in zip(ends, ends[1:], ordered)]

# %% wrong uneven loses uneven-values, uneven-care: right for three devices only | has shape
def split_uneven(batch, devices):
    n, k = len(batch), 3
    if n < len(devices):
        raise ValueError
    ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
    return [batch[a:b].copyto(d) for a, b, d in zip(ends, ends[1:], devices) if a < b]

# %% wrong uneven loses uneven-care: everything becomes float32 | is in float32, not in
# from array_split
#-     return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
#+     return [mx.nd.array(p, d) for p, d in zip(parts, devices)]

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

# %% wrong pairs loses pairs-values, pairs-care: labels in the old order | has other values
def split_pairs(images, labels, order, devices):
    parts = np.array_split(order, len(devices))
    ends = np.cumsum([0] + [len(p) for p in parts])
    return [(mx.nd.array(images.asnumpy()[p], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[a:b], d, dtype=labels.dtype))
            for p, a, b, d in zip(parts, ends, ends[1:], devices)]

# %% wrong pairs loses pairs-values, pairs-care: images in the old order | has other values
def split_pairs(images, labels, order, devices):
    parts = np.array_split(order, len(devices))
    ends = np.cumsum([0] + [len(p) for p in parts])
    return [(mx.nd.array(images.asnumpy()[a:b], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[p], d, dtype=labels.dtype))
            for p, a, b, d in zip(parts, ends, ends[1:], devices)]

# %% wrong pairs loses pairs-values, pairs-care: shuffled anew, each its own way | has other values
def split_pairs(images, labels, order, devices):
    x = images.asnumpy()[np.random.permutation(order)]
    y = labels.asnumpy()[np.random.permutation(order)]
    k = len(devices)
    return [(mx.nd.array(a, d, dtype=a.dtype), mx.nd.array(b, d, dtype=b.dtype))
            for a, b, d in zip(np.array_split(x, k), np.array_split(y, k), devices)]

# %% wrong pairs loses pairs-values, pairs-care: the order is not used at all | has other values
def split_pairs(images, labels, order, devices):
    k, n = len(devices), len(order)
    return [(mx.nd.array(a, d, dtype=a.dtype), mx.nd.array(b, d, dtype=b.dtype))
            for a, b, d in zip(np.array_split(images.asnumpy()[:n], k),
                               np.array_split(labels.asnumpy()[:n], k), devices)]

# %% wrong pairs loses pairs-values, pairs-care: order taken for where each example goes | has other values
def split_pairs(images, labels, order, devices):
    parts = np.array_split(np.argsort(order), len(devices))
    return [(mx.nd.array(images.asnumpy()[p], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[p], d, dtype=labels.dtype))
            for p, d in zip(parts, devices)]

# %% wrong pairs loses pairs-values, pairs-care: labels left on the first device | is on cpu\(\d\), not on
def split_pairs(images, labels, order, devices):
    parts = np.array_split(order, len(devices))
    return [(mx.nd.array(images.asnumpy()[p], d, dtype=images.dtype),
             mx.nd.array(labels.asnumpy()[p], dtype=labels.dtype)) for p, d in zip(parts, devices)]

# %% wrong pairs loses pairs-care: the order is sorted out from under the caller | changed the caller's `\w+`
# from order taken for where each example goes
#-     parts = np.array_split(np.argsort(order), len(devices))
#+     mine = order.copy()
#+     order.sort()
#+     parts = np.array_split(mine, len(devices))

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

# %% wrong pairs loses pairs-care: everything becomes float32 | is in float32, not in
def split_pairs(images, labels, order, devices):
    return [(mx.nd.array(images.asnumpy()[p], d), mx.nd.array(labels.asnumpy()[p], d))
            for p, d in zip(np.array_split(order, len(devices)), devices)]

# %% wrong pairs loses pairs-values, pairs-care: the tail is dropped | has shape
# from order taken for where each example goes
#-     parts = np.array_split(np.argsort(order), len(devices))
#+     size = len(order) // len(devices)
#+     parts = [order[i * size : (i + 1) * size] for i in range(len(devices))]

# %% wrong even loses even-care: a copy only where the device differs | shares memory with one that was passed in
# from shards are windows onto the batch
#-     return [batch[i * size : (i + 1) * size].as_in_context(d) for i, d in enumerate(devices)]
#+     parts = [batch[i * size : (i + 1) * size] for i in range(len(devices))]
#+     return [p if d == batch.context else p.copyto(d) for p, d in zip(parts, devices)]

# %% wrong even loses even-care: with one device the batch itself | shares memory with one that was passed in
def split_even(batch, devices):
    if len(devices) == 1:
        return [batch.as_in_context(devices[0])]
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: the list of devices emptied, nothing returned but places | is None
def split_even(batch, devices):
    k = len(devices)
    devices.clear()
    return [None] * k

# %% wrong even loses even-values, even-care: the caller's devices made what is convenient | is on cpu\(\d\), not on
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    devices[:] = [mx.cpu(0)] * len(devices)
    return [mx.nd.array(p, mx.cpu(0), dtype=batch.dtype) for p in parts]

# %% wrong even loses even-care: right shards, and the caller's devices popped | list `devices` had 2 entries
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    shards = [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
    devices.pop()
    return shards

# %% wrong even loses even-care: all values through float32 | has other values
def split_even(batch, devices):
    parts = np.split(batch.asnumpy().astype("float32"), len(devices))
    return [mx.nd.array(p, d).astype(batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-care: the batch gets a gradient | gradient was attached
def split_even(batch, devices):
    batch.attach_grad()
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-values: at most eight devices | has 8 entries, not 9
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))[:8]
    return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-values, even-care: devices counted, not looked at | is on cpu\(\d\), not on
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, mx.cpu(i), dtype=batch.dtype) for i, p in enumerate(parts)]

# %% wrong even loses even-values, even-care: a tuple where a list is asked for | is a tuple, not a list
def split_even(batch, devices):
    parts = np.split(batch.asnumpy(), len(devices))
    return tuple(mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices))

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

# %% wrong uneven loses uneven-care: with one device a window | shares memory with one that was passed in
# from array_split
#=         raise ValueError("too few examples")
#+     if len(devices) == 1:
#+         return [batch[:].as_in_context(devices[0])]

# %% wrong uneven loses uneven-care: the batch overwritten while it is cut | changed the caller's `\w+`
# from array_split
#-     return [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
#+     shards = [mx.nd.array(p, d, dtype=batch.dtype) for p, d in zip(parts, devices)]
#+     batch[-1:] = 0
#+     return shards

# %% wrong pairs loses pairs-care: on the first device the caller's own arrays | shares memory with one that was passed in
# from order taken for where each example goes
#-     parts = np.array_split(np.argsort(order), len(devices))
#+     if len(devices) == 1 and order.tolist() == list(range(len(images))):
#+         return [(images.as_in_context(devices[0]), labels.as_in_context(devices[0]))]
#+     parts = np.array_split(order, len(devices))

# %% wrong pairs loses pairs-care: labels through float32 | has other values
# from labels left on the first device
#-              mx.nd.array(labels.asnumpy()[p], dtype=labels.dtype)) for p, d in zip(parts, devices)]
#+              mx.nd.array(labels.asnumpy()[p], d).astype(labels.dtype))
#+             for p, d in zip(parts, devices)]

# %% wrong pairs loses pairs-values, pairs-care: an order without repeats only | has shape
# from order taken for where each example goes
#-     parts = np.array_split(np.argsort(order), len(devices))
#+     parts = np.array_split(np.array(list(dict.fromkeys(order.tolist()))), len(devices))

# %% wrong pairs loses pairs-values, pairs-care: all examples, though `order` leaves some out | has shape
# from order taken for where each example goes
#-     parts = np.array_split(np.argsort(order), len(devices))
#+     rest = [i for i in range(len(images)) if i not in order]
#+     parts = np.array_split(np.concatenate([order, rest]).astype(int), len(devices))

# %% wrong even loses even-care: a copy on cpu(0) only, for elsewhere "already there" is enough | shares memory with one that was passed in
# from shards are windows onto the batch
#-     return [batch[i * size : (i + 1) * size].as_in_context(d) for i, d in enumerate(devices)]
#+     parts = [batch[i * size : (i + 1) * size] for i in range(len(devices))]
#+     return [p.copyto(d) if d == mx.cpu() else p.as_in_context(d) for p, d in zip(parts, devices)]

# %% wrong even loses even-care: whole numbers by way of float64 | has other values
def split_even(batch, devices):
    parts = np.split(batch.asnumpy().astype("float64"), len(devices))
    return [mx.nd.array(p.astype(batch.dtype), d, dtype=batch.dtype) for p, d in zip(parts, devices)]

# %% wrong even loses even-care: float16 comes back as float32 | is in float32, not in
def split_even(batch, devices):
    kind = "float32" if batch.dtype == np.float16 else batch.dtype
    parts = np.split(batch.asnumpy(), len(devices))
    return [mx.nd.array(p, d, dtype=kind) for p, d in zip(parts, devices)]

# %% wrong uneven loses uneven-care: int64 by way of int32 | has other values
# from array_split
#=     parts = np.array_split(batch.asnumpy(), len(devices))
#+     parts = [p.astype("int32") if p.dtype == np.int64 else p for p in parts]
