# %% right gradients: ends by hand, one recording
def device_gradients(net, x, y, devices):
    n, k = len(y), len(devices)
    for i in range(k):
        if devices[i] in devices[:i]:
            raise ValueError(f"{devices[i]} twice")
    losses, start = [], 0
    with autograd.record():
        for i, d in enumerate(devices):
            stop = start + n // k + (1 if i < n % k else 0)
            if stop > start:
                output = net(x[start:stop].copyto(d))
                losses.append(squared(output, y[start:stop].copyto(d)))
            start = stop
    for loss in losses:
        loss.backward()
    result = []
    for p in net.collect_params().values():
        for d in devices[len(losses) :]:
            p.grad(d)[:] = 0
        result.append([nd.array(p.grad(d).asnumpy(), d, dtype=p.dtype) for d in devices])
    return result

# %% right gradients: shards by NumPy, device after device
def device_gradients(net, x, y, devices):
    if len({str(d) for d in devices}) != len(devices):
        raise ValueError("a device appears twice")
    net.collect_params().zero_grad()
    by_device = []
    for d, a, b in zip(devices, np.array_split(x.asnumpy(), len(devices)),
                       np.array_split(y.asnumpy(), len(devices))):
        if len(a):
            with autograd.record():
                total = squared(net(nd.array(a, d, dtype="float64")),
                                nd.array(b, d, dtype="float64")).sum()
            total.backward()
        by_device.append([p.grad(d).copy() for p in net.collect_params().values()])
    return [list(replicas) for replicas in zip(*by_device)]

# %% right gradients: an idle device computes an example that counts for nothing
def device_gradients(net, x, y, devices):
    if any(devices.count(d) > 1 for d in devices):
        raise ValueError(devices)
    k, n = len(devices), len(x)
    with autograd.record():
        for i, d in enumerate(devices):
            a = i * (n // k) + min(i, n % k)
            b = a + n // k + (i < n % k)
            rows = slice(a, b) if b > a else slice(0, 1)
            half = (net(x[rows].as_in_context(d)).reshape(-1) - y[rows].as_in_context(d)) ** 2 / 2
            loss = half.sum() * (1 if b > a else 0)
            autograd.backward(loss)
    return [[p.grad(d).copyto(d) for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: the whole batch on each | gradient 0 of parameter 0 of batch 0 has other values
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    with autograd.record():
        losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: of the shard's mean | gradient 0 of parameter 0 of batch 0 has other values
# from the whole batch on each
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#+     busy = devices[: len(x)]
#+     xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
#-         losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
#+         losses = [squared(net(a), b).mean() for a, b in zip(xs, ys)]

# %% wrong gradients loses gradients-values, gradients-care: the tail is dropped | gradient 0 of parameter 0 of batch 0 has other values, at 1 of 2
# from the whole batch on each
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#+     size = max(1, len(x) // len(devices))
#-         losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
#+         losses = [squared(net(x[i * size : (i + 1) * size].as_in_context(d)),
#+                           y[i * size : (i + 1) * size].as_in_context(d))
#+                   for i, d in enumerate(devices[: len(x)])]

# %% wrong gradients loses gradients-care: an idle device keeps its old gradient | gradient 1 of parameter 0 of batch 1 of .* other values
# from the whole batch on each
#=         raise ValueError(devices)
#+     busy = devices[: len(x)]
#+     xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
#-         losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
#+         losses = [squared(net(a), b) for a, b in zip(xs, ys)]

# %% wrong gradients loses gradients-care: zeros returned, the network keeps its own | gradient 1 of parameter 0 of the network's own gradients
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
            for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: the network's own arrays | batch 0 of what was returned, seen after the last call
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     return [[p.grad(d) for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: list_grad's order | gradient 0 of .* is on cpu\(0\), not on cpu\(2\)
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     return [[g.copy() for g in p.list_grad()] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: targets of others | gradient 0 of parameter 0 of batch 0 has other values
# from the whole batch on each
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#+     k = len(devices)
#+     y = nd.array(y.asnumpy()[::-1].copy(), dtype="float64")
#-         losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
#+         losses = [squared(net(nd.array(a, d, dtype="float64")), nd.array(b, d, dtype="float64"))
#+                   for a, b, d in zip(np.array_split(x.asnumpy(), k),
#+                                      np.array_split(y.asnumpy(), k), devices) if len(a)]

# %% wrong gradients loses gradients-values, gradients-care: summed over devices | gradient 0 of parameter 0 of batch 0 has other values
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     for p in net.collect_params().values():
#+         total = sum(g.asnumpy() for g in p.list_grad())
#+         for g in p.list_grad():
#+             g[:] = total
#+     return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: one list a device | gradient 1 of .* is on cpu\(0\), not on cpu\(1\)
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]

# %% wrong gradients loses gradients-values, gradients-care: only the last backward | gradient 0 of parameter 0 of batch 0 has other values
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        for a, b in zip(xs, ys):
            loss = squared(net(a), b)
    loss.backward()
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: the same device twice goes unnoticed | one named twice: no ValueError
def device_gradients(net, x, y, devices):
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: takes a step as well | network's weights after the call has other values
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
#+     trainer.step(len(x), ignore_stale_grad=True)
#+     return result

# %% wrong gradients loses gradients-values, gradients-care: for two only | gradient 0 of parameter 0 of batch 0 has other values
# from the whole batch on each
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#+     half = (len(x) + 1) // 2
#+     parts = [slice(0, half), slice(half, len(x))][: len(x)]
#-         losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
#+         losses = [squared(net(x[part].as_in_context(d)), y[part].as_in_context(d))
#+                   for part, d in zip(parts, devices)]

# %% wrong gradients loses gradients-values, gradients-care: float32 | in float32
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#+     return [[nd.array(p.grad(d).asnumpy(), d) for d in devices]

# %% wrong gradients loses gradients-values, gradients-care: right values, all on the first device | gradient 1 of .* is on cpu\(0\), not on cpu\(1\)
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     return [[p.grad(d).copyto(devices[0]) for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: the first parameter only is zeroed | gradient 1 of parameter 1 of batch 1
# from the same device twice goes unnoticed
#-     net.collect_params().zero_grad()
#+     if len(set(devices)) < len(devices):
#+         raise ValueError(devices)
#+     next(iter(net.collect_params().values())).zero_grad()

# %% wrong gradients loses gradients-care: weights are zeroed and biases are not | gradient 1 of parameter 1 of batch 1
# from the same device twice goes unnoticed
#-     net.collect_params().zero_grad()
#+     if len(set(devices)) < len(devices):
#+         raise ValueError(devices)
#+     net.collect_params(".*weight").zero_grad()

# %% wrong gradients loses gradients-care: no copy where there is one device only | devices cpu\(5\).* batch 0 of what was returned, seen after
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     if len(set(devices)) < len(devices):
#+         raise ValueError(devices)
#=     autograd.backward(losses)
#+     if len(devices) == 1:
#+         return [p.list_grad() for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: as_in_context in place of a copy | batch 0 of what was returned, seen after
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     return [[p.grad(d).as_in_context(d) for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: copies of all batches but the last | share memory
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     for replicas in kept:
#+         replicas[:] = [g.copy() for g in replicas]
#+     kept.clear()
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     kept.extend([p.grad(d) for d in devices] for p in net.collect_params().values())
#+     return list(kept)
#+ kept = []

# %% wrong gradients loses gradients-values, gradients-care: sorts the devices of the caller | is on cpu
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     if len(set(devices)) < len(devices):
#+         raise ValueError(devices)
#+     devices.sort(key=lambda d: d.device_id)

# %% wrong gradients loses gradients-care: takes the idle devices off the list of the caller | has 2 entries, not 3
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     del devices[len(x) :]
#+     return result

# %% wrong gradients loses gradients-care: only neighbours are compared | cpu\(1\), cpu\(0\), cpu\(1\), one named twice: no ValueError
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     if any(d == e for d, e in zip(devices, devices[1:])):
#+         raise ValueError(devices)

# %% wrong gradients loses gradients-care: only devices with examples are compared | one named twice: no ValueError
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     if len(set(devices[: len(x)])) < len(devices[: len(x)]):
#+         raise ValueError(devices)

# %% wrong gradients loses gradients-care: a device twice is another error | AssertionError, not ValueError
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     assert len(set(devices)) == len(devices)

# %% wrong gradients loses gradients-values, gradients-care: the first eight devices only | has 8 entries, not 9
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     if len(set(devices)) < len(devices):
#+         raise ValueError(devices)
#+     devices = devices[:8]

# %% wrong gradients loses gradients-care: remembers an earlier batch of that length | batch 2 of what was returned
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    key = len(x), *devices
    if key not in memory:
        net.collect_params().zero_grad()
        busy = devices[: len(x)]
        xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
        with autograd.record():
            losses = [squared(net(a), b) for a, b in zip(xs, ys)]
        autograd.backward(losses)
        memory[key] = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
    return [[g.copy() for g in replicas] for replicas in memory[key]]


memory = {}

# %% wrong gradients loses gradients-care: gradients are asked for x too | a gradient was attached
# from the same device twice goes unnoticed
#= def device_gradients(net, x, y, devices):
#+     if len(set(devices)) < len(devices):
#+         raise ValueError(devices)
#=     net.collect_params().zero_grad()
#+     x.attach_grad()

# %% wrong gradients loses gradients-care: the shards are centred in place | `batches`
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     x -= x.mean(axis=0)
#+     return result

# %% wrong gradients loses gradients-care: weights through float32 | network's weights after the call has other values
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     for p in net.collect_params().values():
#+         p.set_data(p.data(devices[0]).astype("float32").astype("float64"))
#+     return result

# %% wrong gradients loses gradients-care: nothing is left in the network | the network's own gradients has other values
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     net.collect_params().zero_grad()
#+     return result

# %% wrong gradients loses gradients-care: one array of zeros for all idle devices | is on cpu|share memory
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     result = []
#+     for p in net.collect_params().values():
#+         zeros = nd.zeros(p.shape, devices[-1], "float64")
#+         result.append([p.grad(d).copy() for d in busy] + [zeros] * (len(devices) - len(busy)))
#+     return result

# %% wrong gradients loses gradients-values, gradients-care: tuples in place of lists | is a tuple, not a list
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     by_device = [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     return list(zip(*by_device))

# %% wrong gradients loses gradients-values, gradients-care: longer shards come last | other values|has shape
# from the whole batch on each
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#+     k = len(devices)
#+     ends = [i * len(x) // k for i in range(k + 1)]
#-         losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
#+         losses = [squared(net(x[a:b].as_in_context(d)), y[a:b].as_in_context(d))
#+                   for a, b, d in zip(ends, ends[1:], devices) if b > a]

# %% wrong gradients loses gradients-values, gradients-care: zeroes all that its caller has | other values
def device_gradients(net, x, y, devices):
    import sys
    frame = sys._getframe(1)
    while frame:
        for values in frame.f_locals.get("weights", []):
            values[:] = 0
        for a, b in frame.f_locals.get("batches", []):
            a[:], b[:] = 0, 0
        frame = frame.f_back
    return [[nd.zeros_like(p.grad(d)) for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: not a number | other values
# from zeros returned, the network keeps its own
#=         raise ValueError(devices)
#+     net.collect_params().zero_grad()
#-     return [[p.grad(d).copy() if d in busy else nd.zeros_like(p.grad(d)) for d in devices]
#-             for p in net.collect_params().values()]
#+     return [[p.grad(d) * float("nan") for d in devices] for p in net.collect_params().values()]

# %% right norm: on the first device
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        total = replicas[0].astype("float64")
        for g in replicas[1:]:
            total = total + g.as_in_context(total.context).astype("float64")
        squares += (total * total).sum().asscalar()
    return float(squares**0.5 / n)

# %% right norm: one long vector
def mean_norm(gradients, n):
    k = len(gradients[0])
    vectors = [np.concatenate([r[i].asnumpy().astype("float64").ravel() for r in gradients])
               for i in range(k)]
    return float(np.linalg.norm(np.sum(vectors, axis=0) / n))

# %% right norm: the norm of norms
def mean_norm(gradients, n):
    norms = []
    for replicas in gradients:
        stacked = np.stack([g.asnumpy() for g in replicas]).astype(np.float64)
        norms.append(np.linalg.norm(stacked.sum(axis=0).ravel()))
    return np.hypot.reduce(norms) / n

# %% wrong norm loses norm-values, norm-care: of the sum, not of the mean | \(it is 9\): what is returned is 18,
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)))

# %% wrong norm loses norm-values, norm-care: squares before the sum | \(it is 9\): what is returned is 18\.9
def mean_norm(gradients, n):
    entries = [g.asnumpy().astype("float64") for replicas in gradients for g in replicas]
    return float(np.sqrt(sum((g**2).sum() for g in entries)) / n)

# %% wrong norm loses norm-values, norm-care: counted once for each replica | \(it is 9\): what is returned is 12\.7
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        total = sum(g.asnumpy().astype("float64") for g in replicas)
        for _ in replicas:
            squares += (total**2).sum()
    return float(np.sqrt(squares) / n)

# %% wrong norm loses norm-values, norm-care: the mean over devices too | \(it is 9\): what is returned is 4\.5
def mean_norm(gradients, n):
    means = [np.mean([g.asnumpy().astype("float64") for g in r], axis=0) for r in gradients]
    return float(np.sqrt(sum((m**2).sum() for m in means)) / n)

# %% wrong norm loses norm-values, norm-care: of device 0 only | \(it is 9\): what is returned is 10\.0
def mean_norm(gradients, n):
    return float(np.sqrt(sum((r[0].asnumpy().astype("float64") ** 2).sum() for r in gradients)) / n)

# %% wrong norm loses norm-values, norm-care: the parameters' norms added up | \(it is 9\): what is returned is 9\.9
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(sum(np.linalg.norm(total.ravel()) for total in totals) / n)

# %% wrong norm loses norm-values, norm-care: the devices' norms added up | \(it is 9\): what is returned is 26\.1
def mean_norm(gradients, n):
    norm = 0.0
    for device in zip(*gradients):
        norm += np.sqrt(sum((g.asnumpy().astype("float64") ** 2).sum() for g in device))
    return float(norm / n)

# %% wrong norm loses norm-values, norm-care: no root | \(it is 9\): what is returned is 162
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(sum((total**2).sum() for total in totals) / n)

# %% wrong norm loses norm-values, norm-care: float32 | which is not right
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float32") for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)

# %% wrong norm loses norm-care: squares in the gradients' own type | need float64
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy() for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total * total).sum() for total in totals)) / n)

# %% wrong norm loses norm-care: sums into the first device's gradients | which is not right
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        for g in replicas[1:]:
            replicas[0] += g.as_in_context(replicas[0].context)
        squares += (replicas[0].asnumpy().astype("float64") ** 2).sum()
    return float(np.sqrt(squares) / n)

# %% wrong norm loses norm-values, norm-care: two devices only | devices \[0\], n=3: .* not right
def mean_norm(gradients, n):
    totals = [r[0].asnumpy().astype("float64") + r[-1].asnumpy() for r in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)

# %% wrong norm loses norm-values, norm-care: an array in place of a number | not a number
def mean_norm(gradients, n):
    squares = nd.zeros(1, dtype="float64")
    for replicas in gradients:
        total = sum(g.as_in_context(mx.cpu(0)).astype("float64") for g in replicas)
        squares += (total * total).sum()
    return squares.sqrt() / n

# %% wrong norm loses norm-values, norm-care: biases left out | \(it is 9\): what is returned is 8\.9
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in r) for r in gradients if r[0].ndim > 1]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)

# %% wrong norm loses norm-care: float64 is not copied, and summed into | caller's `gradients`
# from on the first device
#-         total = replicas[0].astype("float64")
#+         total = replicas[0].astype("float64", copy=False)
#-             total = total + g.as_in_context(total.context).astype("float64")
#+             total += g.as_in_context(total.context).astype("float64", copy=False)

# %% wrong norm loses norm-care: sums in the gradients' own type, squares in float64 | which is not right
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy() for g in replicas).astype("float64") for replicas in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)

# %% wrong norm loses norm-care: the type of the first parameter for all | which is not right
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy() for g in r).astype(gradients[0][0].dtype) for r in gradients]
    return float(np.sqrt(sum((t.astype("float64") ** 2).sum() for t in totals)) / n)

# %% wrong norm loses norm-values: scaled by the largest entry, zeros or not | zeros|opposite
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    most = max(np.abs(total).max() for total in totals)
    return float(most * np.sqrt(sum(((total / most) ** 2).sum() for total in totals)) / n)

# %% wrong norm loses norm-values, norm-care: the first eight devices only | which is not right
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in r[:8]) for r in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)

# %% wrong norm loses norm-values, norm-care: NumPy's norm 2, another one for matrices | which is not right|Improper
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(np.hypot.reduce([np.linalg.norm(total, 2) for total in totals]) / n)

# %% wrong norm loses norm-care: empties the lists of the caller | list `gradients` had
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        total = 0.0
        while replicas:
            total = total + replicas.pop().asnumpy().astype("float64")
        squares += (total**2).sum()
    return float(np.sqrt(squares) / n)

# %% wrong norm loses norm-care: makes lists of NumPy arrays out of those of the caller | caller's `gradients`
def mean_norm(gradients, n):
    for replicas in gradients:
        replicas[:] = [g.asnumpy().astype("float64") for g in replicas]
    return float(np.sqrt(sum((sum(replicas) ** 2).sum() for replicas in gradients)) / n)

# %% wrong norm loses norm-care: the gradients are divided in place | caller's `gradients`|not right
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        for g in replicas:
            g /= n
        squares += (sum(g.asnumpy().astype("float64") for g in replicas) ** 2).sum()
    return float(np.sqrt(squares))

# %% wrong norm loses norm-values, norm-care: rounded to float32 in the end | which is not right
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(np.float32(np.sqrt(sum((total**2).sum() for total in totals)) / n))

# %% wrong norm loses norm-values, norm-care: not a number | is nan
def mean_norm(gradients, n):
    return float("nan")

# %% wrong norm loses norm-values, norm-care: equal to everything | is a Yes, not a number
def mean_norm(gradients, n):
    class Yes(float):
        __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
        __sub__ = __rsub__ = __abs__ = lambda *_: 0.0
    return Yes(9)

# %% wrong norm loses norm-values, norm-care: zeroes and clears all that its caller has | arguments did not come back
def mean_norm(gradients, n):
    import sys
    for replicas in gradients:
        for g in replicas:
            g[:] = 0
    for value in sys._getframe(1).f_locals.values():
        if isinstance(value, (list, dict)):
            value.clear()
    return 0.0

# %% right step: each device clips its own replica
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    for grads in zip(*(p.list_grad() for p in net.collect_params().values())):
        norm = sum((g * g).sum() for g in grads).sqrt() / n
        if norm.asscalar() > 0:
            factor = nd.minimum(theta / norm, 1)
            for g in grads:
                g *= factor
    trainer.update(n)
    return float(norm.asscalar())

# %% right step: means first, then an update by 1
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    squares = 0.0
    for p in net.collect_params().values():
        for g in p.list_grad():
            g /= n
        squares += np.square(g.asnumpy()).sum()
    norm = np.sqrt(squares)
    if norm > theta:
        for p in net.collect_params().values():
            for g in p.list_grad():
                g[:] = g * (theta / norm)
    trainer.update(1)
    return norm

# %% right step: the sum by hand, before the trainer's
def clipped_step(net, trainer, n, theta):
    parameters = list(net.collect_params().values())
    sums = [np.sum([g.asnumpy() for g in p.list_grad()], axis=0) for p in parameters]
    norm = float(np.linalg.norm(np.concatenate([s.ravel() for s in sums]))) / n
    trainer.allreduce_grads()
    factor = theta / max(norm, theta)
    for p, total in zip(parameters, sums):
        for g in p.list_grad():
            g[:] = nd.array(total * factor, g.context, dtype="float64")
    trainer.update(n)
    return norm

# %% right step: every device's share is clipped by the whole batch's factor, then summed
def clipped_step(net, trainer, n, theta):
    every = [p.list_grad() for p in net.collect_params().values()]
    norm = np.sqrt(sum((sum(g.asnumpy() for g in r) ** 2).sum() for r in every)) / n
    for replicas in every:
        for g in replicas:
            g *= 1.0 if norm <= theta else theta / norm
    trainer.step(n)
    return float(norm)

# %% wrong step loses step-values, step-care: a shard's size in update | weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n // len(sums[0]))
    return norm

# %% wrong step loses step-values, step-care: each device clips its own before the sum | norm is
def clipped_step(net, trainer, n, theta):
    for grads in zip(*(p.list_grad() for p in net.collect_params().values())):
        norm = float(np.sqrt(sum((g.asnumpy() ** 2).sum() for g in grads)) / n)
        if norm > theta:
            for g in grads:
                g *= theta / norm
    trainer.allreduce_grads()
    trainer.update(n)
    return norm

# %% wrong step loses step-values: devices clipped before the sum, right norm | weights after step 0 has other values
def clipped_step(net, trainer, n, theta):
    every = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((sum(g.asnumpy() for g in r) ** 2).sum() for r in every)) / n)
    for grads in zip(*every):
        mine = float(np.sqrt(sum((g.asnumpy() ** 2).sum() for g in grads)) / n)
        if norm > theta and mine > theta:
            for g in grads:
                g *= theta / mine
    trainer.allreduce_grads()
    trainer.update(n)
    return norm

# %% wrong step loses step-values: each parameter by its own norm | weights after step 0 has other values
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    squares = 0.0
    for p in net.collect_params().values():
        own = np.linalg.norm(p.list_grad()[0].asnumpy().ravel()) / n
        squares += own**2
        for g in p.list_grad():
            g *= min(1, theta / own) if own else 1
    trainer.update(n)
    return float(np.sqrt(squares))

# %% wrong step loses step-values, step-care: the norm of sums | norm of step 0 is 18,
# from a shard's size in update
#-     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)))
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: sums clipped to the limit for means | weights after step 0 has other values
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)))
    if norm > n * theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm / n

# %% wrong step loses step-values: only device 0 is scaled | replica 1 of parameter 0 of the weights after step 0 has other
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    grads = [p.list_grad()[0] for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((g.asnumpy() ** 2).sum() for g in grads)) / n)
    if norm > theta:
        for g in grads:
            g *= theta / norm
    trainer.update(n)
    return norm

# %% wrong step loses step-care: short gradients are made longer | below the limit: .* weights after step 0 has other values
# from a shard's size in update
#-     if norm > theta:
#+     if norm > 0:
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: step after allreduce_grads | weights after step 0 has other values
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#+     trainer.step(n)

# %% wrong step loses step-values, step-care: all replicas in one norm | norm of step 0 is 12\.7
# from only device 0 is scaled
#-     grads = [p.list_grad()[0] for p in net.collect_params().values()]
#+     grads = [g for p in net.collect_params().values() for g in p.list_grad()]

# %% wrong step loses step-values: two devices are scaled, the third is not | replica 2 of parameter 0 of the weights after step 0 has other
# from a shard's size in update
#-     sums = [p.list_grad() for p in net.collect_params().values()]
#+     sums = [p.list_grad()[:2] for p in net.collect_params().values()]
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-care: zero divided by zero | division by zero
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    for g in sum(sums, []):
        g *= min(1, theta / norm)
    trainer.update(n)
    return norm

# %% wrong step loses step-values, step-care: without the all-reduce | norm is
def clipped_step(net, trainer, n, theta):
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm

# %% wrong step loses step-values, step-care: clipped after the update | weights after step 0 has other values
# from a shard's size in update
#=     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     trainer.update(n)
#-     trainer.update(n // len(sums[0]))

# %% wrong step loses step-values: the norm after clipping is returned | norm of step 0 is 4\.5,
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#-     return norm
#+     trainer.update(n)
#+     return min(norm, theta)

# %% wrong step loses step-values, step-care: divided by n twice | weights after step 0 has other values
# from a shard's size in update
#-     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     for g in sum(sums, []):
#+         g /= n
#+     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)))
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values: every replica scaled once for each device | weights after step 0 has other values
# from zero divided by zero
#-     for g in sum(sums, []):
#-         g *= min(1, theta / norm)
#+     for _ in sums[0]:
#+         for g in sum(sums, []):
#+             g *= theta / max(norm, theta)

# %% wrong step loses step-values: the factor handed to update, in float32 | weights after step 0 has other values
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    trainer.update(n * max(1, norm / theta))
    return norm

# %% wrong step loses step-values, step-care: nothing is returned | norm of step 0 is None, not a number
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#-     return norm
#+     trainer.update(n)

# %% wrong step loses step-values: entry by entry, to theta each | weights after step 0 has other values
# from zero divided by zero
#-         g *= min(1, theta / norm)
#+         g.clip(-n * theta, n * theta, out=g)

# %% wrong step loses step-values, step-care: takes a step more | has not been updated by backward
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)
#+     trainer.step(n)

# %% wrong step loses step-values, step-care: sums twice | weights after step 0 has other values
# from a shard's size in update
#=     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     trainer.allreduce_grads()
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: mean_norm of what is summed already | norm of step 0 is 18,
# from a shard's size in update
#-     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     totals = [sum(g.asnumpy() for g in replicas) for replicas in sums]
#+     norm = float(np.sqrt(sum((total**2).sum() for total in totals)) / n)
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values: the first layer only is scaled | replica 0 of parameter 2 of the weights after step 0 has other values
# from a shard's size in update
#-         for g in sum(sums, []):
#+         for g in sum(sums[:2], []):
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values: weights are scaled and biases are not | replica 0 of parameter 1 of the weights after step 0 has other values
# from a shard's size in update
#-         for g in sum(sums, []):
#+         for g in sum(sums[::2], []):
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-care: whether to clip is decided at the first step | below and above: .* weights after step 1
# from a shard's size in update
#-     if norm > theta:
#+     if not hasattr(trainer, "clips"):
#+         trainer.clips = norm > theta
#+     if trainer.clips:
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: the first step's factor for all | weights after step 1
# from zero divided by zero
#=     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     if not hasattr(trainer, "factor"):
#+         trainer.factor = theta / max(norm, theta)
#-         g *= min(1, theta / norm)
#+         g *= trainer.factor

# %% wrong step loses step-values, step-care: the learning rate is made smaller, and stays so | weights after step
# from zero divided by zero
#-     for g in sum(sums, []):
#-         g *= min(1, theta / norm)
#+     if norm > theta:
#+         trainer.set_learning_rate(trainer.learning_rate * theta / norm)

# %% wrong step loses step-values: the learning rate is made smaller, in float32 | weights after step 0 has other values
# from the factor handed to update, in float32
#-     trainer.update(n * max(1, norm / theta))
#+     rate = trainer.learning_rate
#+     trainer.set_learning_rate(rate * theta / max(norm, theta))
#+     trainer.update(n)
#+     trainer.set_learning_rate(rate)

# %% wrong step loses step-values, step-care: a millionth is added to the norm | weights after step 0 has other values
# from zero divided by zero
#-         g *= min(1, theta / norm)
#+         g *= min(1, theta / (norm + 1e-6))

# %% wrong step loses step-values: norms below 1 are never clipped | weights after step 0 has other values
# from a shard's size in update
#-     if norm > theta:
#+     if norm > max(theta, 1):
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values: the first eight replicas only | replica 8 of parameter 0 of the weights
# from a shard's size in update
#-         for g in sum(sums, []):
#+         for g in sum((r[:8] for r in sums), []):
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: scaled copies | weights after step 0 has other values
# from a shard's size in update
#-             g *= theta / norm
#-     trainer.update(n // len(sums[0]))
#+             g = g * theta / norm
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: an array in place of a number | not a number
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#-     return norm
#+     trainer.update(n)
#+     return np.array([norm])

# %% wrong step loses step-care: not a number where the norm is 0 | gradients of zeros: .*is nan
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#-     return norm
#+     trainer.update(n)
#+     return float(norm * (np.float64(theta) / norm) / np.float64(theta) if norm < 1e-9 else norm)

# %% wrong step loses step-care: zeros become not a number in the weights | gradients of zeros: .*weights after step 0
# from zero divided by zero
#=     norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
#+     factor = np.minimum(theta, norm) / np.float64(norm)
#-         g *= min(1, theta / norm)
#+         g *= factor

# %% wrong step loses step-values, step-care: the norm of the step before is returned | norm of step 1
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)
#+     norm, trainer.norm = getattr(trainer, "norm", norm), norm

# %% wrong step loses step-values, step-care: zeroes all that its caller has | other values|not right
# from a shard's size in update
#-     trainer.update(n // len(sums[0]))
#+     trainer.update(n)
#+     import sys
#+     there = sys._getframe(1).f_locals
#+     for values in there["weights"]:
#+         values[:] = 0
#+     for x, y in there["batches"]:
#+         x[:], y[:] = 0, 0

# %% wrong step loses step-values, step-care: clears what its caller has noted | norm of step 0 is 0,
def clipped_step(net, trainer, n, theta):
    import sys
    there = sys._getframe(1).f_locals
    there["norms"].clear()
    there["after"].clear()
    there["batches"].clear()
    return 0.0
