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


# %% wrong gradients loses gradients-values, gradients-care: the whole batch on each | first two
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    with autograd.record():
        losses = [squared(net(x.as_in_context(d)), y.as_in_context(d)) for d in devices]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: of the shard's mean | first two
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b).mean() for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: the tail is dropped | first two
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


# %% wrong gradients loses gradients-care: an idle device keeps its old gradient | had no example
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-care: zeros returned, the network keeps its own | still has
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


# %% wrong gradients loses gradients-care: the network's own arrays | has the second call changed it
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d) for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: list_grad's order | at place \d is on
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[g.copy() for g in p.list_grad()] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: targets of others | another gradient
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    k = len(devices)
    y = nd.array(y.asnumpy()[::-1].copy(), dtype="float64")
    with autograd.record():
        losses = [squared(net(nd.array(a, d, dtype="float64")), nd.array(b, d, dtype="float64"))
                  for a, b, d in zip(np.array_split(x.asnumpy(), k),
                                     np.array_split(y.asnumpy(), k), devices) if len(a)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: summed over devices | first two
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    for p in net.collect_params().values():
        total = sum(g.asnumpy() for g in p.list_grad())
        for g in p.list_grad():
            g[:] = total
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: one list a device | gradients are on
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


# %% wrong gradients loses gradients-values, gradients-care: only the last backward | first two
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


# %% wrong gradients loses gradients-care: the same device twice goes unnoticed | named twice
def device_gradients(net, x, y, devices):
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-care: takes a step as well | weights have changed
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    result = [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.step(len(x), ignore_stale_grad=True)
    return result


# %% wrong gradients loses gradients-values, gradients-care: for two only | another gradient
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    half = (len(x) + 1) // 2
    parts = [slice(0, half), slice(half, len(x))][: len(x)]
    with autograd.record():
        losses = [squared(net(x[part].as_in_context(d)), y[part].as_in_context(d))
                  for part, d in zip(parts, devices)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values, gradients-care: float32 | in float32
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[nd.array(p.grad(d).asnumpy(), d) for d in devices]
            for p in net.collect_params().values()]


# %% wrong gradients loses gradients-values: right values, all on the first device | are on
def device_gradients(net, x, y, devices):
    if len(set(devices)) < len(devices):
        raise ValueError(devices)
    net.collect_params().zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copyto(devices[0]) for d in devices] for p in net.collect_params().values()]


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


# %% wrong norm loses norm-values, norm-care: of the sum, not of the mean | 18.0, not 9
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)))


# %% wrong norm loses norm-values, norm-care: squares before the sum | not 9
def mean_norm(gradients, n):
    entries = [g.asnumpy().astype("float64") for replicas in gradients for g in replicas]
    return float(np.sqrt(sum((g**2).sum() for g in entries)) / n)


# %% wrong norm loses norm-values, norm-care: counted once for each replica | not 9
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        total = sum(g.asnumpy().astype("float64") for g in replicas)
        for _ in replicas:
            squares += (total**2).sum()
    return float(np.sqrt(squares) / n)


# %% wrong norm loses norm-values, norm-care: the mean over devices too | 4.5, not 9
def mean_norm(gradients, n):
    means = [np.mean([g.asnumpy().astype("float64") for g in r], axis=0) for r in gradients]
    return float(np.sqrt(sum((m**2).sum() for m in means)) / n)


# %% wrong norm loses norm-values, norm-care: of device 0 only | not 9
def mean_norm(gradients, n):
    return float(np.sqrt(sum((r[0].asnumpy().astype("float64") ** 2).sum() for r in gradients)) / n)


# %% wrong norm loses norm-values, norm-care: the parameters' norms added up | not 9
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(sum(np.linalg.norm(total.ravel()) for total in totals) / n)


# %% wrong norm loses norm-values, norm-care: the devices' norms added up | not 9
def mean_norm(gradients, n):
    norm = 0.0
    for device in zip(*gradients):
        norm += np.sqrt(sum((g.asnumpy().astype("float64") ** 2).sum() for g in device))
    return float(norm / n)


# %% wrong norm loses norm-values, norm-care: no root | not 9
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(sum((total**2).sum() for total in totals) / n)


# %% wrong norm loses norm-values, norm-care: float32 | times the norm
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float32") for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)


# %% wrong norm loses norm-care: squares in the gradients' own type | need float64
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy() for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total * total).sum() for total in totals)) / n)


# %% wrong norm loses norm-care: sums into the first device's gradients | have been changed
def mean_norm(gradients, n):
    squares = 0.0
    for replicas in gradients:
        for g in replicas[1:]:
            replicas[0] += g.as_in_context(replicas[0].context)
        squares += (replicas[0].asnumpy().astype("float64") ** 2).sum()
    return float(np.sqrt(squares) / n)


# %% wrong norm loses norm-values, norm-care: two devices only | times the norm
def mean_norm(gradients, n):
    totals = [r[0].asnumpy().astype("float64") + r[-1].asnumpy() for r in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)


# %% wrong norm loses norm-values: an array in place of a number | not a number
def mean_norm(gradients, n):
    squares = nd.zeros(1, dtype="float64")
    for replicas in gradients:
        total = sum(g.as_in_context(mx.cpu(0)).astype("float64") for g in replicas)
        squares += (total * total).sum()
    return squares.sqrt() / n


# %% wrong norm loses norm-values, norm-care: biases left out | not 9
def mean_norm(gradients, n):
    totals = [sum(g.asnumpy().astype("float64") for g in r) for r in gradients if r[0].ndim > 1]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)


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


# %% wrong step loses step-values: devices clipped before the sum, right norm | \d: weights
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


# %% wrong step loses step-values: each parameter by its own norm | \d: weights
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


# %% wrong step loses step-values, step-care: the norm of sums | norm is 18.0, not 9
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)))
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm


# %% wrong step loses step-values: sums clipped to the limit for means | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)))
    if norm > n * theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm / n


# %% wrong step loses step-values: only device 0 is scaled | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    grads = [p.list_grad()[0] for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((g.asnumpy() ** 2).sum() for g in grads)) / n)
    if norm > theta:
        for g in grads:
            g *= theta / norm
    trainer.update(n)
    return norm


# %% wrong step loses step-care: short gradients are made longer | below the limit
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > 0:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm


# %% wrong step loses step-values, step-care: step after allreduce_grads | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.step(n)
    return norm


# %% wrong step loses step-values, step-care: all replicas in one norm | norm is 12.7
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    grads = [g for p in net.collect_params().values() for g in p.list_grad()]
    norm = float(np.sqrt(sum((g.asnumpy() ** 2).sum() for g in grads)) / n)
    if norm > theta:
        for g in grads:
            g *= theta / norm
    trainer.update(n)
    return norm


# %% wrong step loses step-values: two devices are scaled, the third is not | replicas of
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad()[:2] for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm


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


# %% wrong step loses step-values: clipped after the update | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    trainer.update(n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    return norm


# %% wrong step loses step-values: the norm after clipping is returned | norm is 4.5, not 9
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return min(norm, theta)


# %% wrong step loses step-values, step-care: divided by n twice | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    for g in sum(sums, []):
        g /= n
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)))
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)
    return norm


# %% wrong step loses step-values: every replica scaled once for each device | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    for _ in sums[0]:
        for g in sum(sums, []):
            g *= theta / max(norm, theta)
    trainer.update(n)
    return norm


# %% wrong step loses step-values: the factor handed to update, in float32 | away from one device's
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    trainer.update(n * max(1, norm / theta))
    return norm


# %% wrong step loses step-values, step-care: nothing is returned | norm is a NoneType
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    if norm > theta:
        for g in sum(sums, []):
            g *= theta / norm
    trainer.update(n)


# %% wrong step loses step-values: entry by entry, to theta each | \d: weights
def clipped_step(net, trainer, n, theta):
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    for g in sum(sums, []):
        g.clip(-n * theta, n * theta, out=g)
    trainer.update(n)
    return norm
