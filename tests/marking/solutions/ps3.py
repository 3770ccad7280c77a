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

# %% right loss: a helper by the name of a function that a later cell gives
def loss(z, labels):
    return z.exp().sum(axis=1).log() - z.pick(labels, axis=1)


def cross_entropy(scores, labels):
    return loss(scores - scores.max(axis=1, keepdims=True), labels)

# %% right loss: the largest as a constant
# What is subtracted changes no loss, so it adds nothing to the gradient.
def cross_entropy(scores, labels):
    pass
    top = scores.max(axis=1, keepdims=True).detach()
    shifted = scores - top
    return shifted.exp().sum(axis=1).log() - shifted.pick(labels, axis=1)

# %% right loss: the largest put back, recorded in both places
# What autograd adds for the one it takes for the other.
def cross_entropy(scores, labels):
    pass
    top = scores.max(axis=1, keepdims=True)
    shifted = scores - top
    return shifted.exp().sum(axis=1).log() + top.reshape(-1) - scores.pick(labels, axis=1)

# %% right loss: labels in float16
# from the largest put back, recorded in both places
# float16 holds every label below 2048, and no network here has as many classes.
#-     return shifted.exp().sum(axis=1).log() + top.reshape(-1) - scores.pick(labels, axis=1)
#+     return shifted.exp().sum(axis=1).log() - shifted.pick(labels.astype('float16'), axis=1)

# %% wrong loss loses loss-values, loss-gradient: their mean | shape \(1,\), not \(2,\)
def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    return (scores.exp().sum(axis=1).log() - scores.pick(labels)).mean()

# %% wrong loss loses loss-gradient: right values, worked out by NumPy | no way from the loss back
def cross_entropy(scores, labels):
    z = scores.asnumpy()
    z = z - z.max(axis=1, keepdims=True)
    y = labels.asnumpy().astype(int)
    losses = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]
    return nd.array(losses, scores.context, dtype=scores.dtype)

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

# %% wrong loss loses loss-values, loss-gradient: a Python list | a list, not an mx.nd array
# from their mean
#-     return (scores.exp().sum(axis=1).log() - scores.pick(labels)).mean()
#+     return list(scores.exp().sum(axis=1).log() - scores.pick(labels))

# %% wrong loss loses loss-gradient: shifted by the largest, up to a million
# from the largest as a constant
#-     top = scores.max(axis=1, keepdims=True).detach()
#+     top = scores.max(axis=1, keepdims=True).clip(-1e6, 1e6)

# %% wrong loss loses loss-gradient: the gradient is that of the sum, however they are weighted
# from the largest put back, recorded in both places
#-     return shifted.exp().sum(axis=1).log() + top.reshape(-1) - scores.pick(labels, axis=1)
#+     return nd.make_loss(shifted.exp().sum(axis=1).log() - shifted.pick(labels, axis=1))

# %% wrong loss loses loss-gradient: a gradient by hand, which takes each loss once
class Loss(autograd.Function):
    def forward(self, scores, labels):
        shifted = scores - scores.max(axis=1, keepdims=True)
        powers = shifted.exp()
        self.save_for_backward(powers / powers.sum(axis=1, keepdims=True), labels)
        return powers.sum(axis=1).log() - shifted.pick(labels, axis=1)

    def backward(self, dy):
        shares, labels = self.saved_tensors
        return shares - labels.astype("int32").one_hot(shares.shape[1], dtype=shares.dtype), None


def cross_entropy(scores, labels):
    return Loss()(scores, labels)

# %% wrong loss loses loss-values: labels in uint8
# from the largest put back, recorded in both places
#-     return shifted.exp().sum(axis=1).log() + top.reshape(-1) - scores.pick(labels, axis=1)
#+     return shifted.exp().sum(axis=1).log() - shifted.pick(labels.astype('uint8').astype('int32'), axis=1)

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

# %% right replicas: one long array on each device, and windows onto it
# Windows that don't overlap: to write into one changes nothing else.
def make_replicas(params, devices):
    if len(set(devices)) < len(devices): raise ValueError
    kinds = {str(p.dtype) for p in params}
    replicas = []
    for d in devices:
        replica = []
        for i, p in enumerate(params):
            old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
            p.attach_grad()
            replica.append(p)
        replicas.append(replica)
        pass
    return replicas

# %% right replicas: copied twice, by way of the first device
# from one long array on each device, and windows onto it
# What is returned is a copy all the same.
#-     kinds = {str(p.dtype) for p in params}
#=         for i, p in enumerate(params):
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#+             old, p = p, p.copyto(devices[0]).copyto(d)

# %% wrong replicas loses replicas-values, replicas-care: all is cleared | replica 0 is None
def make_replicas(params, devices):
    k = len(devices)
    devices.clear()
    return [None] * k

# %% wrong replicas loses replicas-care: detached at home, where that copies nothing | shares memory
def make_replicas(params, devices):
    if len(set(devices)) < len(devices):
        raise ValueError("a device twice")
    replicas = [[p.as_in_context(d).detach() for p in params] for d in devices]
    for replica in replicas:
        for p in replica:
            p.attach_grad()
    return replicas

# %% wrong replicas loses replicas-care: the caller's parameters get gradients too | was attached
# from detached at home, where that copies nothing
#-     replicas = [[p.as_in_context(d).detach() for p in params] for d in devices]
#-     for replica in replicas:
#+     replicas = [[p.copyto(d) for p in params] for d in devices]
#+     for replica in [params, *replicas]:

# %% wrong replicas loses replicas-care: the caller's devices are used up | list `devices` had 2
# from detached at home, where that copies nothing
#-     replicas = [[p.as_in_context(d).detach() for p in params] for d in devices]
#+     replicas = []
#+     while devices:
#+         replicas.append([p.copyto(devices.pop(0)) for p in params[:1]])
#+         replicas[-1] += [p.copyto(replicas[-1][0].context) for p in params[1:]]

# %% wrong replicas loses replicas-values, replicas-care: eight at most | 8 entries, not 9
# from detached at home, where that copies nothing
#-     replicas = [[p.as_in_context(d).detach() for p in params] for d in devices]
#+     replicas = [[p.copyto(d) for p in params] for d in devices[:8]]

# %% wrong replicas loses replicas-care: twice: looked at of the first device only
# from one long array on each device, and windows onto it
#-     if len(set(devices)) < len(devices): raise ValueError
#-     kinds = {str(p.dtype) for p in params}
#+     if devices.count(devices[0]) > 1: raise ValueError
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#+             old, p = p, p.copyto(d)

# %% wrong replicas loses replicas-care: twice: looked at of the last device only
# from one long array on each device, and windows onto it
#-     if len(set(devices)) < len(devices): raise ValueError
#-     kinds = {str(p.dtype) for p in params}
#+     if devices.count(devices[-1]) > 1: raise ValueError
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#+             old, p = p, p.copyto(d)

# %% wrong replicas loses replicas-care: twice: looked at where there are parameters
# from one long array on each device, and windows onto it
#-     if len(set(devices)) < len(devices): raise ValueError
#-     kinds = {str(p.dtype) for p in params}
#+     if params and len(set(devices)) < len(devices): raise ValueError
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#+             old, p = p, p.copyto(d)

# %% wrong replicas loses replicas-care: a parameter that is there twice is copied once
# from one long array on each device, and windows onto it
#-     kinds = {str(p.dtype) for p in params}
#+     kept = {}
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#+             old, p = p, kept.setdefault((id(p), d), p.copyto(d))

# %% wrong replicas loses replicas-care: in memory that an earlier call has returned
# from one long array on each device, and windows onto it
#+ kept = {}
#-     kinds = {str(p.dtype) for p in params}
#=         for i, p in enumerate(params):
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#+             old, p = p, p.copyto(kept.setdefault((i, p.shape, str(p.dtype), d), nd.empty(p.shape, d, p.dtype)))

# %% wrong replicas loses replicas-care: gradients in float32
# from one long array on each device, and windows onto it
#-     kinds = {str(p.dtype) for p in params}
#=         for i, p in enumerate(params):
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#-             p.attach_grad()
#+             old, p = p, p.copyto(d)
#+             autograd.mark_variables([p], [nd.zeros(p.shape, d)])

# %% wrong replicas loses replicas-values: added up where the parameter has a gradient
# from one long array on each device, and windows onto it
#-     kinds = {str(p.dtype) for p in params}
#=         for i, p in enumerate(params):
#-             old, p = p, (nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) if len(kinds) == 1 else p.copyto(d))
#-             p.attach_grad()
#+             old, p = p, p.copyto(d)
#+             p.attach_grad('write' if old.grad is None else 'add')

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

# %% right step: stale gradients made zero before the step, and all added
# Zeros add nothing.
def train_step(xs, ys, replicas, lr):
    [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
    n = sum(len(x) for x in xs)
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    for value in losses:
        value.backward()
    with_shard = replicas[: len(xs)]
    added = replicas
    for i in range(len(replicas[0])):
        total = nd.zeros_like(replicas[0][i])
        for r, replica in enumerate(added):
            p = replica[i]
            total += p.grad.copyto(total.context)
        for r, replica in enumerate(replicas):
            p = replica[i]
            p -= lr / n * total.copyto(p.context)
    pass
    return sum(value.asscalar() for value in losses) / n

# %% right step: stale gradients times zero
# from stale gradients made zero before the step, and all added
# Zero times a number is zero.
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     pass
#-             total += p.grad.copyto(total.context)
#+             total += p.grad.copyto(total.context) * (r < len(xs))

# %% right step: no update where the gradient is zero
# from stale gradients made zero before the step, and all added
# Without momentum a gradient of zero changes nothing.
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     pass
#-     added = replicas
#+     added = with_shard
#-             p -= lr / n * total.copyto(p.context)
#+             if total.asnumpy().any():
#+                 p -= lr / n * total.copyto(p.context)

# %% right step: no update where the rate is 0
# from stale gradients made zero before the step, and all added
# A rate of 0 changes nothing.
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     pass
#-     added = replicas
#+     added = with_shard
#-             p -= lr / n * total.copyto(p.context)
#+             if lr:
#+                 p -= lr / n * total.copyto(p.context)

# %% right step: the rate by a factor
# from stale gradients made zero before the step, and all added
# It is off by one rounding.
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     pass
#-     added = replicas
#+     added = with_shard
#-             p -= lr / n * total.copyto(p.context)
#+             p -= lr * (1 / n) * total.copyto(p.context)

# %% right step: gradients made zero when all is done
# from stale gradients made zero before the step, and all added
# What gradients hold after the step is left open.
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     pass
#-     added = replicas
#+     added = with_shard
#-     pass
#+     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]

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

# %% wrong step loses step-values, step-care: sgd_update, its rate in float32 | e-0\d of the larg
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#-             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
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

# %% wrong step loses step-values, step-care: one list on cpu(0) stands for all | another array
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#=             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
#+     home = [p.as_in_context(mx.cpu(0)) for p in replicas[0]]
#+     for i in range(1, len(replicas)):
#+         replicas[i] = home

# %% wrong step loses step-values, step-care: eight devices at most | k=9, .* 8 has not changed
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#+     replicas = replicas[:8]
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])

# %% wrong step loses step-care: the caller's shards are used up | the caller's list `batches`
# from replicas without a shard are left behind
#-     n, replicas = sum(len(x) for x in xs), replicas[: len(xs)]
#+     n = sum(len(x) for x in xs)
#-         total = sum(p.grad.asnumpy() for p in same)
#+         total = sum(p.grad.asnumpy() for p in same[: len(xs)])
#=             p -= lr / n * nd.array(total, p.context, dtype=p.dtype)
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

# %% wrong step loses step-care: all gradients are added, and made zero after each step
# from stale gradients made zero before the step, and all added
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     pass
#-     pass
#+     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]

# %% wrong step loses step-values, step-care: no rate, no work
# from stale gradients made zero before the step, and all added
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#+     if not lr: return 0.0
#-     added = replicas
#+     added = with_shard

# %% wrong step loses step-care: n counts examples that differ
# from stale gradients made zero before the step, and all added
#-     [p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]
#-     n = sum(len(x) for x in xs)
#+     pass
#+     n = len({tuple(row) for x in xs for row in x.asnumpy().tolist()})
#-     added = replicas
#+     added = with_shard

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

# %% right epoch: full batches by whole numbers, then the rest
# The same batches.
def train_epoch(images, labels, order, size, step):
    pass
    total, m = 0.0, len(order)
    parts = [order[b * size : (b + 1) * size] for b in range(m // size)] + ([order[m - m % size :]] if m % size else [])
    for part in parts:
        index = nd.array(part, dtype='int32')
        total += step(images.take(index), labels.take(index), len(part))
    return total / len(order)

# %% right epoch: the mean by a factor
# from full batches by whole numbers, then the rest
# It is off by one rounding.
#-     parts = [order[b * size : (b + 1) * size] for b in range(m // size)] + ([order[m - m % size :]] if m % size else [])
#+     parts = [order[b : b + size] for b in range(0, len(order), size)]
#-     return total / len(order)
#+     return total * (1 / len(order))

# %% wrong epoch loses epoch-care: the mean counts all images | order of 9, .* the mean loss
def train_epoch(images, labels, order, size, step):
    total = 0.0
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        total += step(images.take(chosen), labels.take(chosen), len(chosen))
    return total / len(labels)

# %% wrong epoch loses epoch-values, epoch-care: batches of one example too few | batch 0 has shape
# from the mean counts all images
#-         chosen = nd.array(order[begin : begin + size], dtype="int32")
#+         chosen = nd.array(order[begin : begin + size - 1], dtype="int32")
#-     return total / len(labels)
#+     return total / len(order)

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

# %% wrong epoch loses epoch-values, epoch-care: nothing is returned | None, not a number
# from the mean counts all images
#-     return total / len(labels)
#+     return None

# %% wrong epoch loses epoch-care: the caller's order is sorted at the end | the caller's `order`
# from the mean counts all images
#-     return total / len(labels)
#+     order.sort()
#+     return total / len(order)

# %% wrong epoch loses epoch-values, epoch-care: one named twice comes once | examples named twice
# from the mean counts all images
#-     total = 0.0
#+     total, order = 0.0, np.array(list(dict.fromkeys(order)))
#-     return total / len(labels)
#+     return total / len(order)

# %% wrong epoch loses epoch-values, epoch-care: a whole batch at least | batches of 7: .* shape
# from the mean counts all images
#=     total = 0.0
#+     if len(order) < size:
#+         order = np.resize(order, size)
#-     return total / len(labels)
#+     return total / len(order)

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
# from the mean counts all images
#-         total += step(images.take(chosen), labels.take(chosen), len(chosen))
#-     return total / len(labels)
#+         total += step(images.take(chosen), labels.take(chosen))
#+     return total / len(order)

# %% wrong epoch loses epoch-values: images flattened to rows | has shape \(4, 1\), not \(4,\)
# from the mean counts all images
#-         total += step(images.take(chosen), labels.take(chosen), len(chosen))
#-     return total / len(labels)
#+         x = images.take(chosen).reshape((len(chosen), -1))
#+         total += step(x, labels.take(chosen), len(chosen))
#+     return total / len(order)

# %% wrong epoch loses epoch-care: numbers in float16
# from full batches by whole numbers, then the rest
#-     parts = [order[b * size : (b + 1) * size] for b in range(m // size)] + ([order[m - m % size :]] if m % size else [])
#+     parts = [order[b : b + size] for b in range(0, len(order), size)]
#-         index = nd.array(part, dtype='int32')
#+         index = nd.array(part, dtype='float16')

# %% wrong epoch loses epoch-values, epoch-care: the batches of an earlier order as long
# from full batches by whole numbers, then the rest
#+ kept = {}
#-     parts = [order[b * size : (b + 1) * size] for b in range(m // size)] + ([order[m - m % size :]] if m % size else [])
#+     parts = kept.setdefault((len(order), size), [order[b : b + size].copy() for b in range(0, len(order), size)])

# %% wrong epoch loses epoch-values: full batches by a factor, then the rest
# from full batches by whole numbers, then the rest
#-     parts = [order[b * size : (b + 1) * size] for b in range(m // size)] + ([order[m - m % size :]] if m % size else [])
#+     parts = [order[b * size : (b + 1) * size] for b in range(int(m * (1 / size)))] + ([order[m - m % size :]] if m % size else [])

# %% wrong epoch loses epoch-care: no more batches after a loss of 0
# from full batches by whole numbers, then the rest
#-     parts = [order[b * size : (b + 1) * size] for b in range(m // size)] + ([order[m - m % size :]] if m % size else [])
#+     parts = [order[b : b + size] for b in range(0, len(order), size)]
#-         total += step(images.take(index), labels.take(index), len(part))
#+         loss = step(images.take(index), labels.take(index), len(part))
#+         total += loss
#+         if not loss:
#+             break
