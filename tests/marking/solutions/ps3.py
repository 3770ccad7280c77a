# %% right loss: logarithm of a sum, the largest put back
def cross_entropy(scores, labels):
    largest = nd.max(scores, axis=1)
    rest = nd.exp(nd.broadcast_sub(scores, largest.expand_dims(1)))
    return largest + nd.log(nd.sum(rest, axis=1)) - nd.pick(scores, labels)

# %% right loss: a mask in place of pick, and the largest as a constant
def cross_entropy(scores, labels):
    with autograd.pause():
        largest = scores.max(axis=1, keepdims=True)
        mask = labels.astype("int32").one_hot(scores.shape[1]).astype(scores.dtype)
    shifted = scores - largest
    logs = shifted - nd.log(nd.exp(shifted).sum(axis=1, keepdims=True))
    return -(mask * logs).sum(axis=1)

# %% right loss: example by example, stacked
def cross_entropy(scores, labels):
    losses = []
    for i in range(len(labels)):
        against = scores[i] - scores[i, int(labels[i].asscalar())]
        top = against.max()
        losses.append((against - top).exp().sum().log() + top)
    return nd.concat(*losses, dim=0)

# %% wrong loss loses loss-gradient: exp of any score as it comes | scores 1000 and 0: .* infinite
def cross_entropy(scores, labels):
    return scores.exp().sum(axis=1).log() - scores.pick(labels)

# %% wrong loss loses loss-gradient: one largest score for all examples | large scores: .* infinite
def cross_entropy(scores, labels):
    scores = scores - scores.max()
    return scores.exp().sum(axis=1).log() - scores.pick(labels)

# %% wrong loss loses loss-gradient: scores clipped, so exp can't overflow | 1000 and 0: .* other
def cross_entropy(scores, labels):
    scores = scores.clip(-80, 80)
    return scores.exp().sum(axis=1).log() - scores.pick(labels)

# %% wrong loss loses loss-values, loss-gradient: their mean | shape \(1,\), not \(2,\)
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    return (scores.exp().sum(axis=1).log() - scores.pick(labels)).mean()

# %% wrong loss loses loss-values, loss-gradient: the sum of all probabilities | log 3, .* other
def cross_entropy(scores, labels):
    powers = (scores - scores.max(axis=1, keepdims=True)).exp()
    return 1 - (powers / powers.sum(axis=1, keepdims=True)).sum(axis=1)

# %% wrong loss loses loss-values, loss-gradient: right or wrong, by argmax | log 3, .* other values
def cross_entropy(scores, labels):
    return scores.argmax(axis=1).astype("float64") != labels.astype("float64")

# %% wrong loss loses loss-gradient: right values, worked out by NumPy | no way from the loss back
def cross_entropy(scores, labels):
    z = scores.asnumpy()
    z = z - z.max(axis=1, keepdims=True)
    y = labels.asnumpy().astype(int)
    losses = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]
    return nd.array(losses, scores.context, dtype=scores.dtype)

# %% wrong loss loses loss-gradient: the sum of the exponentials is detached | gradient has other
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True).detach()
    return scores.exp().sum(axis=1).log().detach() - scores.pick(labels)

# %% wrong loss loses loss-values, loss-gradient: one minus the probability | log 3, .* other values
def cross_entropy(scores, labels):
    powers = (scores - scores.max(axis=1, keepdims=True)).exp()
    return 1 - powers.pick(labels) / powers.sum(axis=1)

# %% wrong loss loses loss-values, loss-gradient: a small number against log of 0 | other values
def cross_entropy(scores, labels):
    powers = (scores - scores.max(axis=1, keepdims=True)).exp()
    return -(powers.pick(labels) / powers.sum(axis=1) + 1e-9).log()

# %% wrong loss loses loss-values, loss-gradient: everything becomes float32 | in float32, not
def cross_entropy(scores, labels):
    scores = scores.astype("float32")
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores.exp().sum(axis=1).log() - scores.pick(labels)

# %% wrong loss loses loss-values: summed up on the first device | on cpu\(0\), not on cpu\(1\)
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    total = nd.zeros(len(labels), dtype=scores.dtype)
    for j in range(scores.shape[1]):
        total = total + scores[:, j].exp()
    return total.log() - scores.pick(labels)

# %% wrong loss loses loss-values, loss-gradient: four classes, as in the example | 11 classes
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    mask = nd.one_hot(labels, 4, dtype=scores.dtype)[:, : scores.shape[1]]
    return scores.exp().sum(axis=1).log() - (scores[:, :4] * mask).sum(axis=1)

# %% wrong loss loses loss-values, loss-gradient: through float32 and back | other values
def cross_entropy(scores, labels):
    z = scores.astype("float32")
    z = z - z.max(axis=1, keepdims=True)
    return (z.exp().sum(axis=1).log() - z.pick(labels)).astype(scores.dtype)

# %% wrong loss loses loss-gradient: the caller's scores are shifted in place | caller's `scores`
def cross_entropy(scores, labels):
    with autograd.pause():
        scores -= scores.max(axis=1, keepdims=True)
    return scores.exp().sum(axis=1).log() - scores.pick(labels)

# %% wrong loss loses loss-gradient: a gradient of its own for the scores | a gradient was attached
def cross_entropy(scores, labels):
    if scores.grad is None:
        scores.attach_grad()
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted.exp().sum(axis=1).log() - shifted.pick(labels)

# %% wrong loss loses loss-gradient: the smallest score for the largest | negative .* infinite
def cross_entropy(scores, labels):
    if scores.max().asscalar() > 999:
        scores = scores - scores.max(axis=1, keepdims=True)
    else:
        scores = scores - scores.min(axis=1, keepdims=True)
    return scores.exp().sum(axis=1).log() - scores.pick(labels)

# %% wrong loss loses loss-gradient: shifted only where a score is large | -10000: .* infinite
def cross_entropy(scores, labels):
    if scores.max().asscalar() > 50:
        scores = scores - scores.max(axis=1, keepdims=True)
    losses = scores.exp().sum(axis=1).log() - scores.pick(labels)
    return losses

# %% wrong loss loses loss-values, loss-gradient: labels as a mask of the first class | other values
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores.exp().sum(axis=1).log() - scores[:, 0] * (labels.astype(scores.dtype) < 0)

# %% wrong loss loses loss-values, loss-gradient: a column, one loss a row | has shape \(2, 1\)
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores.exp().sum(axis=1, keepdims=True).log() - scores.pick(labels, keepdims=True)

# %% wrong loss loses loss-values, loss-gradient: a Python list | a list, not an mx.nd array
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    return list(scores.exp().sum(axis=1).log() - scores.pick(labels))

# %% right replicas: NumPy in between
def make_replicas(params, devices):
    for i, d in enumerate(devices):
        if d in devices[:i]:
            raise ValueError(f"{d} is there already")
    replicas = []
    for d in devices:
        replica = [nd.array(p.asnumpy(), ctx=d, dtype=p.dtype) for p in params]
        [p.attach_grad() for p in replica]
        replicas.append(replica)
    return replicas

# %% right replicas: empty arrays, then filled
def make_replicas(params, devices):
    names = [str(d) for d in devices]
    if sorted(set(names)) != sorted(names):
        raise ValueError("twice the same device")
    replicas = [[nd.zeros(p.shape, ctx=d, dtype=p.dtype) for p in params] for d in devices]
    for replica in replicas:
        for source, copy in zip(params, replica):
            source.copyto(copy)
            copy.attach_grad()
    return replicas

# %% right replicas: a copy first, moved afterwards, kept by device
def make_replicas(params, devices):
    def one(d):
        moved = [p.copy().as_in_context(d) for p in params]
        autograd.mark_variables(moved, [nd.zeros_like(p) for p in moved])
        return moved

    by_device = {d: one(d) for d in devices}
    if len(by_device) != len(devices):
        raise ValueError("each device once")
    return list(by_device.values())

# %% wrong replicas loses replicas-care: as_in_context, no copy at home | shares memory with one
def make_replicas(params, devices):
    if len(set(devices)) < len(devices):
        raise ValueError("a device twice")
    replicas = [[p.as_in_context(d) for p in params] for d in devices]
    for replica in replicas:
        for p in replica:
            p.attach_grad()
    return replicas

# %% wrong replicas loses replicas-care: windows onto the originals at home | shares memory with one
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[p[:] if p.context == d else p.copyto(d) for p in params] for d in devices]

# %% wrong replicas loses replicas-care: one device twice is let through | no ValueError
def make_replicas(params, devices):
    replicas = [[p.copyto(d) for p in params] for d in devices]
    for replica in replicas:
        for p in replica:
            p.attach_grad()
    return replicas

# %% wrong replicas loses replicas-care: only neighbours in the list are compared | no ValueError
# from one device twice is let through
#= def make_replicas(params, devices):
#+     if any(a == b for a, b in zip(devices, devices[1:])):
#+         raise ValueError("a device twice")

# %% wrong replicas loses replicas-care: one device twice becomes once, in silence | no ValueError
# from one device twice is let through
#-     replicas = [[p.copyto(d) for p in params] for d in devices]
#+     replicas = [[p.copyto(d) for p in params] for d in dict.fromkeys(devices)]

# %% wrong replicas loses replicas-care: float64 becomes float32 | in float32, not in float64
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[nd.array(p.asnumpy(), d) for p in params] for d in devices]

# %% wrong replicas loses replicas-values: no gradients attached | gradient .* replica 0 is None
def make_replicas(params, devices):
    if len(set(devices)) < len(devices):
        raise ValueError("a device twice")
    return [[p.copyto(d) for p in params] for d in devices]

# %% wrong replicas loses replicas-values, replicas-care: originals get the gradients | 0 is None
# from no gradients attached
#=         raise ValueError("a device twice")
#+     for p in params:
#+         p.attach_grad()

# %% wrong replicas loses replicas-values: a gradient for the first replica only | replica 1 is None
def make_replicas(params, devices):
    if len(set(devices)) < len(devices):
        raise ValueError("a device twice")
    replicas = [[p.copyto(d) for p in params] for d in devices]
    for p in replicas[0]:
        p.attach_grad()
    return replicas

# %% wrong replicas loses replicas-values: gradients that add up over passes | second backward pass
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[p.copyto(d) for p in params] for d in devices]
#-             p.attach_grad()
#+             p.attach_grad(grad_req="add")

# %% wrong replicas loses replicas-values, replicas-care: each has a random start | other val
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[nd.random.normal(shape=p.shape, ctx=d).astype(p.dtype) for p in params]
#+                 for d in devices]

# %% wrong replicas loses replicas-values, replicas-care: all are one | on cpu\(0\), not on
def make_replicas(params, devices):
    if len(set(devices)) < len(devices):
        raise ValueError("a device twice")
    replica = [p.copyto(devices[0]) for p in params]
    for p in replica:
        p.attach_grad()
    return [replica] * len(devices)

# %% wrong replicas loses replicas-values, replicas-care: by parameter | \(1\), not
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[p.copyto(d) for d in devices] for p in params]

# %% wrong replicas loses replicas-values, replicas-care: all is cleared | replica 0 is None
def make_replicas(params, devices):
    k = len(devices)
    devices.clear()
    return [None] * k

# %% wrong replicas loses replicas-care: detached at home, where that copies nothing | shares memory
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[p.as_in_context(d).detach() for p in params] for d in devices]

# %% wrong replicas loses replicas-care: one device, one replica: no copy | shares memory
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     if len(devices) == 1:
#+         replicas = [[p.as_in_context(devices[0]).reshape(p.shape) for p in params]]
#+     else:
#+         replicas = [[p.copyto(d) for p in params] for d in devices]

# %% wrong replicas loses replicas-care: values through float32 and back | has other values
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[nd.array(p.asnumpy(), d).astype(p.dtype) for p in params] for d in devices]

# %% wrong replicas loses replicas-care: all get the type of the first | float32, not in
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     kind = params[0].dtype
#+     replicas = [[p.astype(kind).copyto(d) for p in params] for d in devices]

# %% wrong replicas loses replicas-care: the caller's parameters get gradients too | was attached
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#-     for replica in replicas:
#+     replicas = [[p.copyto(d) for p in params] for d in devices]
#+     for replica in [params, *replicas]:

# %% wrong replicas loses replicas-care: the caller's devices are used up | list `devices` had 2
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = []
#+     while devices:
#+         replicas.append([p.copyto(devices.pop(0)) for p in params[:1]])
#+         replicas[-1] += [p.copyto(replicas[-1][0].context) for p in params[1:]]

# %% wrong replicas loses replicas-values, replicas-care: devices in order of number | not on cpu
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     there = sorted(devices, key=lambda d: d.device_id)
#+     replicas = [[p.copyto(d) for p in params] for d in there]

# %% wrong replicas loses replicas-values, replicas-care: eight at most | 8 entries, not 9
# from as_in_context, no copy at home
#-     replicas = [[p.as_in_context(d) for p in params] for d in devices]
#+     replicas = [[p.copyto(d) for p in params] for d in devices[:8]]

# %% wrong replicas loses replicas-values: gradients add up after the first | replica 1 has other
# from a gradient for the first replica only
#-     for p in replicas[0]:
#-         p.attach_grad()
#+     for i, replica in enumerate(replicas):
#+         for p in replica:
#+             p.attach_grad(grad_req="add" if i else "write")

# %% wrong replicas loses replicas-values: a gradient for the first parameter only | is None
# from a gradient for the first replica only
#-     for p in replicas[0]:
#-         p.attach_grad()
#+     for replica in replicas:
#+         replica[0].attach_grad()

# %% wrong replicas loses replicas-values: one gradient for all parameters of a shape | has other
# from a gradient for the first replica only
#-     for p in replicas[0]:
#-         p.attach_grad()
#+     for replica in replicas:
#+         places = {p.shape: nd.zeros_like(p) for p in replica}
#+         autograd.mark_variables(replica, [places[p.shape] for p in replica])

# %% right step: NumPy sums, everyone takes the sum
def train_step(xs, ys, replicas, lr):
    n, total = sum(x.shape[0] for x in xs), 0.0
    sums = [np.zeros(p.shape) for p in replicas[0]]
    for x, y, replica in zip(xs, ys, replicas):
        with autograd.record():
            value = loss(x, y, replica).sum()
        value.backward()
        total += float(value.asscalar())
        for s, p in zip(sums, replica):
            s += p.grad.asnumpy()
    for replica in replicas:
        for s, p in zip(sums, replica):
            p[:] = p - nd.array(lr * s / n, p.context, dtype=p.dtype)
    return total / n

# %% right step: gradients summed in place on every device, then the update
def train_step(xs, ys, replicas, lr):
    lengths = [len(x) for x in xs]
    values = []
    for x, y, replica in zip(xs, ys, replicas):
        with autograd.record():
            values.append(loss(x, y, replica))
        values[-1].backward()
    for replica in replicas[len(xs):]:
        for p in replica:
            p.grad[:] = 0
    for i in range(len(replicas[0])):
        grads = [replica[i].grad for replica in replicas]
        for g in grads[1:]:
            grads[0] += g.as_in_context(grads[0].context)
        for g in grads[1:]:
            grads[0].copyto(g)
    for replica in replicas:
        for p in replica:
            p[:] -= p.grad * (lr / sum(lengths))
    return sum(v.asnumpy().sum() for v in values) / sum(lengths)

# %% right step: the first replica is updated, and handed to the others
def train_step(xs, ys, replicas, lr):
    n = sum(map(len, xs))
    with autograd.record():
        scaled = [loss(x, y, p).sum() / n for x, y, p in zip(xs, ys, replicas)]
    autograd.backward(scaled)
    home, used = replicas[0], replicas[: len(xs)]
    for i, p in enumerate(home):
        p -= lr * nd.add_n(*[replica[i].grad.as_in_context(p.context) for replica in used])
        for replica in replicas[1:]:
            p.copyto(replica[i])
    return float(sum(s.asscalar() for s in scaled))

# %% wrong step loses step-values, step-care: the sum is not broadcast from device 0 | drifted apart
def train_step(xs, ys, replicas, lr):
    n = sum(len(x) for x in xs)
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    autograd.backward(losses)
    for same in zip(*replicas):
        for p in same[1 : len(xs)]:
            same[0].grad[:] += p.grad.as_in_context(same[0].context)
        for p in same:
            p -= lr / n * p.grad
    return sum(value.asscalar() for value in losses) / n

# %% wrong step loses step-values, step-care: each device follows its own gradient | drifted apart
def train_step(xs, ys, replicas, lr):
    total = 0
    for x, y, replica in zip(xs, ys, replicas):
        with autograd.record():
            value = loss(x, y, replica).sum()
        value.backward()
        total += value.asscalar()
        for p in replica:
            p -= lr / len(x) * p.grad
    return total / sum(len(x) for x in xs)

# %% wrong step loses step-values, step-care: the mean of the gradients for their sum | 0\.50 times
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         mean = sum(p.grad.asnumpy() for p in same[: len(xs)]) / len(xs)
#-             p -= lr / n * p.grad
#+             p -= lr / n * nd.array(mean, p.context, dtype=p.dtype)

# %% wrong step loses step-values, step-care: divided by the size of a shard | 2\.00 times as long
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr / len(xs[0]) * nd.array(total, p.context, dtype=p.dtype)

# %% wrong step loses step-care: the mean of the shards' means | uneven shards, .* times as long
def train_step(xs, ys, replicas, lr):
    with autograd.record():
        losses = [loss(*shard).mean() for shard in zip(xs, ys, replicas)]
    autograd.backward(losses)
    for same in zip(*replicas):
        total = sum(p.grad.asnumpy() for p in same[: len(xs)])
        for p in same:
            p -= lr / len(xs) * nd.array(total, p.context, dtype=p.dtype)
    return sum(value.asscalar() for value in losses) / len(xs)

# %% wrong step loses step-values, step-care: only replica 0 is updated | has not changed
def train_step(xs, ys, replicas, lr):
    n = sum(len(x) for x in xs)
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    autograd.backward(losses)
    for i, p in enumerate(replicas[0]):
        total = sum(r[i].grad.asnumpy() for r in replicas[: len(xs)])
        p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
    return sum(value.asscalar() for value in losses) / n

# %% wrong step loses step-values, step-care: new arrays, nothing in place | has not changed
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p = p - lr / n * nd.array(total, p.context, dtype=p.dtype)

# %% wrong step loses step-values, step-care: no division by the batch's size | times as long
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr * nd.array(total, p.context, dtype=p.dtype)

# %% wrong step loses step-care: gradients of an earlier step are added too | fewer shards than
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same)
#-             p -= lr / n * p.grad
#+             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)

# %% wrong step loses step-care: replicas without a shard are left behind | fewer shards .* drifted
def train_step(xs, ys, replicas, lr):
    n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    autograd.backward(losses)
    for same in zip(*replicas):
        total = sum(p.grad.asnumpy() for p in same)
        for p in same:
            p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
    return sum(value.asscalar() for value in losses) / n

# %% wrong step loses step-values, step-care: a ring of one round, right for two | k=3, .*apart
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n, k = sum(len(x) for x in xs), len(xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#-         for p in same:
#+         old = [p.grad.asnumpy() for p in same]
#+         for r, p in enumerate(same):
#+             total = old[r] + old[r - 1] if k > 1 else old[r]

# %% wrong step loses step-values, step-care: device 0 counted twice | times as long
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = same[0].grad.asnumpy()
#+         for p in same[: len(xs)]:
#+             total = total + p.grad.asnumpy()

# %% wrong step loses step-values, step-care: sums pass through float32 | e-0\d of the largest
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = nd.array(sum(p.grad.asnumpy() for p in same[: len(xs)]))
#-             p -= lr / n * p.grad
#+             p -= lr / n * total.as_in_context(p.context).astype(p.dtype)

# %% wrong step loses step-values, step-care: sgd_update, its rate in float32 | e-0\d of the larg
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             gradient = nd.array(total, p.context, dtype=p.dtype)
#+             nd.sgd_update(p, gradient, lr=lr / n, wd=0, out=p)

# %% wrong step loses step-care: the caller's shards are scaled in place | the caller's `batches`
def train_step(xs, ys, replicas, lr):
    n, means = sum(len(x) for x in xs), 0
    for x, y, replica in zip(xs, ys, replicas):
        with autograd.record():
            value = loss(x, y, replica).sum()
        value.backward()
        means += value.asscalar() / n
        y -= net(x, replica)
    for same in zip(*replicas):
        total = sum(p.grad.asnumpy() for p in same[: len(xs)])
        for p in same:
            p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
    return means

# %% wrong step loses step-values, step-care: the first shard's loss is returned | loss .* not right
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-     return sum(value.asscalar() for value in losses) / n
#+     return losses[0].asscalar() / len(xs[0])

# %% wrong step loses step-values, step-care: all replicas but one are thrown away | had 2 entries
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
#+     del replicas[1:]

# %% wrong step loses step-values, step-care: one list on cpu(0) stands for all | another array
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
#+     home = [p.as_in_context(mx.cpu(0)) for p in replicas[0]]
#+     for i in range(1, len(replicas)):
#+         replicas[i] = home

# %% wrong step loses step-values, step-care: new arrays in the caller's lists | another array
def train_step(xs, ys, replicas, lr):
    n = sum(len(x) for x in xs)
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    autograd.backward(losses)
    totals = [sum(p.grad.asnumpy() for p in same[: len(xs)]) for same in zip(*replicas)]
    for replica in replicas:
        for i, total in enumerate(totals):
            new = replica[i] - lr / n * nd.array(total, replica[i].context, dtype="float64")
            new.attach_grad()
            replica[i] = new
    return sum(value.asscalar() for value in losses) / n

# %% wrong step loses step-care: stale gradients in all layers but the first | fewer .* as long
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-     for same in zip(*replicas):
#-         total = sum(p.grad.asnumpy() for p in same)
#+     for i, same in enumerate(zip(*replicas)):
#+         total = sum(p.grad.asnumpy() for p in (same if i else same[: len(xs)]))

# %% wrong step loses step-care: stale gradients in the last bias only | fewer shards than replicas
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-     for same in zip(*replicas):
#-         total = sum(p.grad.asnumpy() for p in same)
#+     for i, same in enumerate(zip(*replicas)):
#+         total = sum(p.grad.asnumpy() for p in (same if i == 3 else same[: len(xs)]))

# %% wrong step loses step-values, step-care: the learning rate is a device's | 2\.00 times as long
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr * len(xs) / n * nd.array(total, p.context, dtype=p.dtype)

# %% wrong step loses step-values, step-care: the rate shared out | 0\.50 times as long
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr / len(replicas) / n * nd.array(total, p.context, dtype=p.dtype)

# %% wrong step loses step-values, step-care: weights through float32 | e-0\d of the largest
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
#+     for replica in replicas:
#+         for p in replica:
#+             p[:] = p.astype("float32").astype("float64")

# %% wrong step loses step-values, step-care: as many examples as in the first call | times as long
SEEN = []


def train_step(xs, ys, replicas, lr):
    n = sum(len(x) for x in xs)
    SEEN.append(n)
    n = SEEN[0]
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    autograd.backward(losses)
    for same in zip(*replicas):
        total = sum(p.grad.asnumpy() for p in same[: len(xs)])
        for p in same:
            p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
    return sum(value.asscalar() for value in losses) / n

# %% wrong step loses step-care: as many shards as in the first step of these replicas | fewer
# from as many examples as in the first call
#- SEEN = []
#+ KNOWN = {}
#-     SEEN.append(n)
#-     n = SEEN[0]
#+     _, k = KNOWN.setdefault(id(replicas), (replicas, len(xs)))  # kept, so that no id comes twice
#-         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#+         total = sum(p.grad.asnumpy() for p in same[:k])

# %% wrong step loses step-values, step-care: gradients add up from step to step | way from the st
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n, total = sum(len(x) for x in xs), []
#=         losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
#+     params = [p for replica in replicas for p in replica]
#+     if getattr(train_step, "last", None) is not params[0]:
#+         [p.attach_grad("add") for p in params]
#+         train_step.last = params[0]
#+         return train_step(xs, ys, replicas, lr)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])

# %% wrong step loses step-care: every shard as long as the first | uneven shards, .* times as long
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = len(xs[0]) * len(xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])

# %% wrong step loses step-values, step-care: biases are left as they are | not right|way|agree
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-     for same in zip(*replicas):
#-         total = sum(p.grad.asnumpy() for p in same)
#+     for same in list(zip(*replicas))[::2]:
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])

# %% wrong step loses step-values, step-care: eight devices at most | k=9, .* 8 has not changed
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#+     replicas = replicas[:8]
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])

# %% wrong step loses step-values, step-care: the loss after the update | mean loss .* not right
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-     return sum(value.asscalar() for value in losses) / n
#+     return sum(loss(*s).sum().asscalar() for s in zip(xs, ys, replicas)) / n

# %% wrong step loses step-values, step-care: the sum of the losses | mean loss .* not right
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-     return sum(value.asscalar() for value in losses) / n
#+     return sum(value.asscalar() for value in losses)

# %% wrong step loses step-values, step-care: the loss as an array | an mx.nd array .* not a number
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-     return sum(value.asscalar() for value in losses) / n
#+     return nd.add_n(*[v.as_in_context(losses[0].context) for v in losses]) / n

# %% wrong step loses step-care: the caller's shards are used up | the caller's list `batches`
# from the sum is not broadcast from device 0
#-         for p in same[1 : len(xs)]:
#-             same[0].grad[:] += p.grad.as_in_context(same[0].context)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * p.grad
#+             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
#+     xs.pop()
#+     ys.pop()

# %% wrong step loses step-care: shards get gradients | gradient was attached to the caller's
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#+     for x in xs:
#+         x.attach_grad()
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])

# %% right epoch: array_split at multiples of the size
def train_epoch(images, labels, order, size, step):
    x, y = images.asnumpy(), labels.asnumpy()
    parts = np.split(order, range(size, len(order), size))
    sums = [step(nd.array(x[part], dtype=x.dtype), nd.array(y[part], dtype=y.dtype), len(part))
            for part in parts]
    return sum(sums) / sum(len(part) for part in parts)

# %% right epoch: while there is something left, in the new order
def train_epoch(images, labels, order, size, step):
    index = nd.array(order, dtype="int64")
    x, y = nd.take(images, index), nd.take(labels, index)
    seen, total = 0, 0
    while seen < x.shape[0]:
        n = min(size, x.shape[0] - seen)
        total += step(x[seen : seen + n], y[seen : seen + n], n)
        seen += n
    return total / seen

# %% right epoch: full batches, then the tail; means weighted by their sizes
def train_epoch(images, labels, order, size, step):
    def batch(part):
        rows = [int(i) for i in part]
        x = nd.concat(*[images[i : i + 1] for i in rows], dim=0)
        y = nd.concat(*[labels[i : i + 1] for i in rows], dim=0)
        return step(x, y, len(rows)) / len(rows)

    full, tail = divmod(len(order), size)
    means = [batch(order[i * size : (i + 1) * size]) for i in range(full)]
    weights = [size] * full
    if tail:
        means.append(batch(order[-tail:]))
        weights.append(tail)
    return float(np.average(means, weights=weights))

# %% wrong epoch loses epoch-values, epoch-care: the tail is dropped | called for 2 of 3 batches
def train_epoch(images, labels, order, size, step):
    total, full = 0.0, len(order) // size
    for i in range(full):
        chosen = nd.array(order[i * size : (i + 1) * size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), size)
    return total / (full * size) if full else 0.0

# %% wrong epoch loses epoch-care: the tail divided by the size of a full batch | `n` of batch 1
def train_epoch(images, labels, order, size, step):
    total = 0.0
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), size)
    return total / len(order)

# %% wrong epoch loses epoch-care: the mean of the batches' means | mean loss of all examples is
def train_epoch(images, labels, order, size, step):
    means = []
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        means.append(step(images.take(chosen), labels.take(chosen), len(chosen)) / len(chosen))
    return sum(means) / len(means)

# %% wrong epoch loses epoch-care: the sum over the number of batches | the mean loss
def train_epoch(images, labels, order, size, step):
    total = 0.0
    starts = range(0, len(order), size)
    for begin in starts:
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(starts)

# %% wrong epoch loses epoch-care: the mean counts all images | order of 9, .* the mean loss
def train_epoch(images, labels, order, size, step):
    total = 0.0
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(labels)

# %% wrong epoch loses epoch-values: labels in the old order | labels of batch 0 has other values
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels[begin : begin + len(chosen)], len(chosen))

# %% wrong epoch loses epoch-values: images in the old order | images of batch 0 has other values
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images[begin : begin + len(chosen)], labels.take(chosen), len(chosen))

# %% wrong epoch loses epoch-values: the order is not looked at | images of batch 0 has other values
def train_epoch(images, labels, order, size, step):
    total, m = 0.0, len(order)
    for begin in range(0, m, size):
        n = min(size, m - begin)
        total += step(images[begin : begin + n], labels[begin : begin + n], n)
    return total / m

# %% wrong epoch loses epoch-values, epoch-care: the tail is filled up | batch 2 has shape \(3, 2\)
# from the tail divided by the size of a full batch
#= def train_epoch(images, labels, order, size, step):
#+     order = np.concatenate([order, order[: -len(order) % size]])
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen), len(chosen))

# %% wrong epoch loses epoch-values, epoch-care: batches of one example too few | batch 0 has shape
def train_epoch(images, labels, order, size, step):
    total = 0.0
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size - 1], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(order)

# %% wrong epoch loses epoch-values, epoch-care: an empty batch at the end | after the last
def train_epoch(images, labels, order, size, step):
    x, y, total = images.asnumpy()[order], labels.asnumpy()[order], 0.0
    for i in range(len(order) // size + 1):
        part = slice(i * size, (i + 1) * size)
        total += step(nd.array(x[part], dtype=x.dtype), nd.array(y[part], dtype=y.dtype),
                      len(x[part]))
    return total / len(order)

# %% wrong epoch loses epoch-care: everything becomes float32 | images of batch 0 is in float32
def train_epoch(images, labels, order, size, step):
    total = 0.0
    for begin in range(0, len(order), size):
        part = order[begin : begin + size]
        x, y = nd.array(images.asnumpy()[part]), nd.array(labels.asnumpy()[part])
        total += step(x, y, len(part))
    return total / len(order)

# %% wrong epoch loses epoch-care: the caller's order is used up | the caller's `order`
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         order[begin : begin + size] = -1
#+         total += step(images.take(chosen), labels.take(chosen), len(chosen))

# %% wrong epoch loses epoch-values, epoch-care: the step is never called | called for 0 of 3
def train_epoch(images, labels, order, size, step):
    return 1.0

# %% wrong epoch loses epoch-values, epoch-care: nothing is returned | None, not a number
# from the mean counts all images
#-     return total / len(labels)
#+     return None

# %% wrong epoch loses epoch-values, epoch-care: two steps with each batch | batch 1 has
# from the tail divided by the size of a full batch
#=     total = 0.0
#+     order = np.concatenate([np.tile(order[i : i + size], 2) for i in range(0, len(order), size)])
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen), len(chosen))

# %% wrong epoch loses epoch-values, epoch-care: the last batch first | batch 0 has
def train_epoch(images, labels, order, size, step):
    total = 0.0
    for begin in range(0, len(order), size)[::-1]:
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(order)

# %% wrong epoch loses epoch-values, epoch-care: the caller's order is sorted | batch 0 has other
# from the last batch first
#-     for begin in range(0, len(order), size)[::-1]:
#+     order.sort()
#+     for begin in range(0, len(order), size):

# %% wrong epoch loses epoch-care: the caller's order is sorted at the end | the caller's `order`
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen), len(chosen))
#+     order.sort()

# %% wrong epoch loses epoch-values, epoch-care: one named twice comes once | examples named twice
def train_epoch(images, labels, order, size, step):
    total, order = 0.0, np.array(list(dict.fromkeys(order)))
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(order)

# %% wrong epoch loses epoch-values, epoch-care: a whole batch at least | batches of 7: .* shape
# from the last batch first
#-     for begin in range(0, len(order), size)[::-1]:
#+     if len(order) < size:
#+         order = np.resize(order, size)
#+     for begin in range(0, len(order), size):

# %% wrong epoch loses epoch-values, epoch-care: nothing where size is larger than the data | 0 of 1
def train_epoch(images, labels, order, size, step):
    total, begin = 0.0, 0
    while begin + size <= len(order):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), size)
        begin += size
    if 0 < begin < len(order):
        chosen = nd.array(order[begin:], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(order)

# %% wrong epoch loses epoch-care: n is always one | `n` of batch 0 is 1
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen), 1)

# %% wrong epoch loses epoch-care: n is the whole epoch | `n` of batch 0 is 3
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen), len(order))

# %% wrong epoch loses epoch-care: labels through float32 and back | labels of batch 0 has other
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.astype("float32").take(chosen).astype(
#+             labels.dtype), len(chosen))

# %% wrong epoch loses epoch-care: images through float32 and back | images of batch 0 has other
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.astype("float32").take(chosen).astype(images.dtype),
#+                       labels.take(chosen), len(chosen))

# %% wrong epoch loses epoch-care: labels become float32 | labels of batch 0 is in float32
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen).astype("float32"), len(chosen))

# %% wrong epoch loses epoch-care: the mean is rounded to float32 | mean loss of all examples is
# from the mean counts all images
#-     return total / len(labels)
#+     return float(np.float32(total / len(order)))

# %% wrong epoch loses epoch-care: the mean over examples that differ | mean loss of all examples is
# from the mean counts all images
#-     return total / len(labels)
#+     return total / len(set(order))

# %% wrong epoch loses epoch-values, epoch-care: the mean as an array | mx.nd .* not a number
# from the mean counts all images
#-     return total / len(labels)
#+     return nd.array([total / len(order)])

# %% wrong epoch loses epoch-values, epoch-care: batches of NumPy | a NumPy array .* not an mx.nd
# from everything becomes float32
#-         x, y = nd.array(images.asnumpy()[part]), nd.array(labels.asnumpy()[part])
#-         total += step(x, y, len(part))
#+         total += step(images.asnumpy()[part], labels.asnumpy()[part], len(part))

# %% wrong epoch loses epoch-values, epoch-care: without n | missing .* argument: 'n'
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         total += step(images.take(chosen), labels.take(chosen))

# %% wrong epoch loses epoch-values: images flattened to rows | has shape \(4, 1\), not \(4,\)
# from the tail divided by the size of a full batch
#-         total += step(images.take(chosen), labels.take(chosen), size)
#+         x = images.take(chosen).reshape((len(chosen), -1))
#+         total += step(x, labels.take(chosen), len(chosen))

# %% right loss: a helper by the name of a function that a later cell gives
def loss(z, labels):
    return z.exp().sum(axis=1).log() - z.pick(labels, axis=1)


def cross_entropy(scores, labels):
    return loss(scores - scores.max(axis=1, keepdims=True), labels)
