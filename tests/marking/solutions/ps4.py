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

# %% right gradients: added up, onto zeros
# Added to zero it is that batch's; how the network takes later gradients is left open.
def device_gradients(net, x, y, devices):
    n, k = len(x), len(devices)
    parameters = list(net.collect_params().values())
    if len(set(devices)) < len(devices): raise ValueError
    for p in parameters: p.grad_req = 'add'; p.zero_grad()
    ends, losses = [i * (n // k) + min(i, n % k) for i in range(k + 1)], []
    with autograd.record():
        for a, b, d in zip(ends, ends[1:], devices):
            if a < b:
                losses.append(squared(net(x[a:b].copyto(d)), y[a:b].copyto(d)))
    autograd.backward(losses)
    pass
    found = [[p.grad(d).copy() for i, d in enumerate(devices)] for p in parameters]
    pass
    return found

# %% right gradients: zero by writing, where there is no shard
# from added up, onto zeros
# Where there is a shard, backward overwrites.
#-     for p in parameters: p.grad_req = 'add'; p.zero_grad()
#+     for p in parameters:
#+         for d in devices[n:]: p.grad(d)[:] = 0

# %% right gradients: zero after the backward, where there is no shard
# from added up, onto zeros
# Whoever has no shard gets nothing from backward.
#-     for p in parameters: p.grad_req = 'add'; p.zero_grad()
#+     pass
#-     pass
#+     for p in parameters:
#+         for d in devices[n:]: p.grad(d)[:] = 0

# %% wrong gradients loses gradients-values, gradients-care: the tail is dropped | gradient 0 of parameter 0 of batch 0 has other values, at 1 of 2
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    size = max(1, len(x) // len(devices))
    with autograd.record():
        losses = [squared(net(x[i * size : (i + 1) * size].as_in_context(d)),
                          y[i * size : (i + 1) * size].as_in_context(d))
                  for i, d in enumerate(devices[: len(x)])]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: one list a device | gradient 1 of .* is on cpu\(0\), not on cpu\(1\)
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]

# %% wrong gradients loses gradients-values, gradients-care: float32 | in float32
# from one list a device
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     return [[nd.array(p.grad(d).asnumpy(), d) for d in devices]
#+             for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: copies of all batches but the last | share memory
# from one list a device
#=         raise ValueError(devices)
#+     for replicas in kept:
#+         replicas[:] = [g.copy() for g in replicas]
#+     kept.clear()
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     kept.extend([p.grad(d) for d in devices] for p in net.collect_params().values())
#+     return list(kept)
#+ kept = []

# %% wrong gradients loses gradients-care: takes the idle devices off the list of the caller | has 2 entries, not 3
# from one list a device
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     del devices[len(x) :]
#+     return result

# %% wrong gradients loses gradients-care: only devices with examples are compared | one named twice: no ValueError
# from one list a device
#-     if len(set(devices)) < len(devices):
#+     if len(set(devices[: len(x)])) < len(devices[: len(x)]):
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-values, gradients-care: the first eight devices only | has 8 entries, not 9
# from one list a device
#=         raise ValueError(devices)
#+     devices = devices[:8]
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

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
# from one list a device
#=     net.collect_params().zero_grad()
#+     x.attach_grad()
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]

# %% wrong gradients loses gradients-care: the shards are centred in place | `batches`
# from one list a device
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
#+     x -= x.mean(axis=0)
#+     return result

# %% wrong gradients loses gradients-care: one array of zeros for all idle devices | is on cpu|share memory
# from one list a device
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     result = []
#+     for p in net.collect_params().values():
#+         zeros = nd.zeros(p.shape, devices[-1], "float64")
#+         result.append([p.grad(d).copy() for d in busy] + [zeros] * (len(devices) - len(busy)))
#+     return result

# %% wrong gradients loses gradients-values, gradients-care: tuples in place of lists | is a tuple, not a list
# from one list a device
#-     return [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     by_device = [[p.grad(d).copy() for p in net.collect_params().values()] for d in devices]
#+     return list(zip(*by_device))

# %% wrong gradients loses gradients-care: twice: looked at of neighbours, first and last among them
# from added up, onto zeros
#-     if len(set(devices)) < len(devices): raise ValueError
#-     for p in parameters: p.grad_req = 'add'; p.zero_grad()
#+     if k > 1 and any(a == b for a, b in zip(devices, devices[1:] + devices[:1])): raise ValueError
#+     for p in parameters: p.zero_grad()

# %% wrong gradients loses gradients-care: zero after a batch that had a longer one before
# from added up, onto zeros
#+ seen = []
#-     for p in parameters: p.grad_req = 'add'; p.zero_grad()
#+     if seen and seen[-1] > n:
#+         for p in parameters: p.zero_grad()
#+     seen.append(n)

# %% wrong gradients loses gradients-values, gradients-care: shards end rounded up
# from added up, onto zeros
#-     for p in parameters: p.grad_req = 'add'; p.zero_grad()
#-     ends, losses = [i * (n // k) + min(i, n % k) for i in range(k + 1)], []
#+     for p in parameters: p.zero_grad()
#+     ends, losses = [-(-i * n // k) for i in range(k + 1)], []

# %% wrong gradients loses gradients-care: shards end by a factor, which rounds
# from added up, onto zeros
#-     for p in parameters: p.grad_req = 'add'; p.zero_grad()
#-     ends, losses = [i * (n // k) + min(i, n % k) for i in range(k + 1)], []
#+     for p in parameters: p.zero_grad()
#+     ends, losses = [i * int(n * (1 / k)) + min(i, n % k) for i in range(k + 1)], []

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

# %% right norm: divided by n before the squares
# Off by a rounding.
def mean_norm(gradients, n):
    pass
    totals = [sum(g.asnumpy().astype('float64') for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum(((t / n) ** 2).sum() for t in totals)))

# %% right norm: n by a factor
# from divided by n before the squares
# Off by a rounding.
#-     return float(np.sqrt(sum(((t / n) ** 2).sum() for t in totals)))
#+     return float(np.sqrt(sum((t**2).sum() for t in totals)) * (1 / n))

# %% right norm: zeros are returned early
# The norm of zeros is 0.
def mean_norm(gradients, n):
    if not any(g.asnumpy().any() for r in gradients for g in r): return 0.0
    totals = [sum(g.asnumpy().astype('float64') for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((t**2).sum() for t in totals)) / n)

# %% wrong norm loses norm-values, norm-care: an array in place of a number | not a number
def mean_norm(gradients, n):
    squares = nd.zeros(1, dtype="float64")
    for replicas in gradients:
        total = sum(g.as_in_context(mx.cpu(0)).astype("float64") for g in replicas)
        squares += (total * total).sum()
    return squares.sqrt() / n

# %% wrong norm loses norm-values: scaled by the largest entry, zeros or not | zeros|opposite
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    most = max(np.abs(total).max() for total in totals)
    return float(most * np.sqrt(sum(((total / most) ** 2).sum() for total in totals)) / n)

# %% wrong norm loses norm-values, norm-care: the first eight devices only | which is not right
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in r[:8]) for r in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)

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

# %% wrong norm loses norm-values: equal gradients of parameters count once
def mean_norm(gradients, n):
    pass
    totals = {str([g.asnumpy().tolist() for g in replicas]): sum(g.asnumpy().astype('float64') for g in replicas) for replicas in gradients}.values()
    return float(np.sqrt(sum((t**2).sum() for t in totals)) / n)

# %% wrong norm loses norm-values, norm-care: equal gradients of devices count once
def mean_norm(gradients, n):
    one = lambda rs: {str(r.asnumpy().tolist()): r for r in rs}.values()
    totals = [sum(g.asnumpy().astype('float64') for g in one(replicas)) for replicas in gradients]
    return float(np.sqrt(sum((t**2).sum() for t in totals)) / n)

# %% wrong norm loses norm-values: where all devices have the same, it is the sum already
# from zeros are returned early
#-     if not any(g.asnumpy().any() for r in gradients for g in r): return 0.0
#+     gradients = [r[:1] for r in gradients] if all((r[0].asnumpy() == g.asnumpy()).all() for r in gradients for g in r[1:]) else gradients

# %% wrong norm loses norm-values: gradients of zero are devices that don't count
def mean_norm(gradients, n):
    busy = sum(any(r[i].asnumpy().any() for r in gradients) for i in range(len(gradients[0]))) or 1
    totals = [sum(g.asnumpy().astype('float64') for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((t**2).sum() for t in totals)) / n) * len(gradients[0]) / busy

# %% wrong norm loses norm-values, norm-care: n is 2 at least
# from divided by n before the squares
#-     return float(np.sqrt(sum(((t / n) ** 2).sum() for t in totals)))
#+     return float(np.sqrt(sum((t**2).sum() for t in totals)) / max(2, n))

# %% wrong norm loses norm-values, norm-care: n in float32
# from divided by n before the squares
#-     return float(np.sqrt(sum(((t / n) ** 2).sum() for t in totals)))
#+     return float(np.sqrt(sum((t**2).sum() for t in totals)) * np.float32(1 / n))

# %% wrong norm loses norm-values: that of an earlier call with gradients of these shapes
# from divided by n before the squares
#+ kept = {}
#-     return float(np.sqrt(sum(((t / n) ** 2).sum() for t in totals)))
#+     return kept.setdefault((str([r[0].shape for r in gradients]), len(gradients[0]), n), float(np.sqrt(sum((t**2).sum() for t in totals)) / n))

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

# %% right step: returns early below the limit
# There is nothing else to do.
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm <= theta: trainer.update(n); return norm
    if norm > theta:
        for replicas in sums:
            for i, g in enumerate(replicas):
                g *= theta / norm
    trainer.update(n)
    pass
    return norm

# %% right step: returns early where the norm is 0, after the update
# from returns early below the limit
# There is nothing to clip.
#-     if norm <= theta: trainer.update(n); return norm
#+     if not norm: trainer.update(n); return 0.0

# %% right step: an update that stale gradients may take part in
# from returns early below the limit
# Every device has run its backward, so no gradient is stale.
#-     if norm <= theta: trainer.update(n); return norm
#+     pass
#-     trainer.update(n)
#+     trainer.update(n, ignore_stale_grad=True)

# %% right step: no sum where there is one device
# from returns early below the limit
# The sum of one is that one.
#-     trainer.allreduce_grads()
#+     if len(net[0].weight.list_ctx()) > 1: trainer.allreduce_grads()
#-     if norm <= theta: trainer.update(n); return norm
#+     pass

# %% wrong step loses step-values, step-care: step after allreduce_grads | weights after step 0 has other values
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.step(n)
    return norm

# %% wrong step loses step-values, step-care: nothing is returned | norm of step 0 is None, not a number
# from step after allreduce_grads
#-     trainer.step(n)
#-     return norm
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: takes a step more | has not been updated by backward
# from step after allreduce_grads
#=             g *= theta / norm
#+     trainer.update(n)

# %% wrong step loses step-values: norms below 1 are never clipped | weights after step 0 has other values
# from step after allreduce_grads
#-     if norm > theta:
#+     if norm > max(theta, 1):
#-     trainer.step(n)
#+     trainer.update(n)

# %% wrong step loses step-values: the first eight replicas only | replica 8 of parameter 0 of the weights
# from step after allreduce_grads
#-         for g in sum(sums, []):
#+         for g in sum((r[:8] for r in sums), []):
#-     trainer.step(n)
#+     trainer.update(n)

# %% wrong step loses step-values, step-care: clears what its caller has noted | norm of step 0 is 0,
def clipped_step(net, trainer, n, theta):
    import sys
    there = sys._getframe(1).f_locals
    there["norms"].clear()
    there["after"].clear()
    there["batches"].clear()
    return 0.0

# %% wrong step loses step-care: no update where the norm is 0
# from returns early below the limit
#-     if norm <= theta: trainer.update(n); return norm
#+     if norm == 0: return norm

# %% wrong step loses step-values, step-care: the first limit for all steps
# from returns early below the limit
#+ limits = {}
#-     if norm <= theta: trainer.update(n); return norm
#+     theta = limits.setdefault(trainer, theta)

# %% wrong step loses step-care: no step is clipped after one that wasn't
# from returns early below the limit
#+ done = {}
#-     if norm <= theta: trainer.update(n); return norm
#-     if norm > theta:
#+     pass
#+     if norm > theta and done.get(trainer, True):
#-     pass
#+     done[trainer] = norm > theta

# %% wrong step loses step-values: not summed where the first device has nothing
# from returns early below the limit
#-     trainer.allreduce_grads()
#+     if any(p.list_grad()[0].asnumpy().any() for p in net.collect_params().values()): trainer.allreduce_grads()
#-     if norm <= theta: trainer.update(n); return norm
#+     pass
