"""Other readings of assignment 3. See `test_readings`.

Solutions are put together from the parts that can be read in another way: what a loss is shifted
by, what a copy is made of, whose gradients are added, where a batch ends.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- loss

def loss(top="scores.max(axis=1, keepdims=True)", picked="shifted.pick(labels, axis=1)",
         before="", first="pass", result="{}", logs="shifted.exp().sum(axis=1).log()"):
    return f"""{before}
def cross_entropy(scores, labels):
    {first}
    top = {top}
    shifted = scores - top
    return {result.format(f"{logs} - {picked}")}
"""


BOTH = ["loss-values", "loss-gradient"]
for what, top in (
        ("mean", "scores.mean(axis=1, keepdims=True)"),
        ("smallest", "scores.min(axis=1, keepdims=True)"),
        ("first", "scores.slice_axis(1, 0, 1)"),
        ("right class's", "scores.pick(labels, axis=1, keepdims=True)"),
        ("largest, or by 0", "nd.relu(scores.max(axis=1, keepdims=True))"),
        ("largest without its sign", "scores.abs().max(axis=1, keepdims=True)"),
        ("largest of its class", "scores.max(axis=0, keepdims=True)"),
        ("half of the largest", "scores.max(axis=1, keepdims=True) / 2"),
        ("largest, up to a million", "scores.max(axis=1, keepdims=True).clip(-1e6, 1e6)")):
    wrong("loss", BOTH if "class" in what and "its" in what else ["loss-gradient"],
          f"shifted by the {what}", loss(top))
wrong("loss", ["loss-gradient"], "the largest put back as a constant only",
      loss(result="({}) * 1 + (top - top.detach()).reshape(-1)"))
wrong("loss", ["loss-gradient"], "the gradient is that of the sum, however they are weighted",
      loss(result="nd.make_loss({})"))
wrong("loss", ["loss-gradient"], "a gradient by hand, which takes each loss once", """
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
""")
for kind in ("uint8", "int8"):
    wrong("loss", ["loss-values"], f"labels in {kind}",
          loss(picked=f"shifted.pick(labels.astype('{kind}').astype('int32'), axis=1)"))
wrong("loss", BOTH, "the labels of an earlier batch of that size", loss(
    before="kept = {}", first="labels = kept.setdefault(labels.shape, labels)"))
right("loss", "the largest as a constant", loss("scores.max(axis=1, keepdims=True).detach()"),
      "What is subtracted changes no loss, so it adds nothing to the gradient.")
right("loss", "the largest put back, recorded in both places", loss(
    logs="shifted.exp().sum(axis=1).log() + top.reshape(-1)",
    picked="scores.pick(labels, axis=1)"), "What autograd adds for the one it takes for the other.")
right("loss", "labels in float16", loss(picked="shifted.pick(labels.astype('float16'), axis=1)"),
      "float16 holds every label below 2048, and no network here has as many classes.")


# --- replicas

TWICE = "if len(set(devices)) < len(devices): raise ValueError"


def replicas(check=TWICE, copy="p.copyto(d)", before="", attach="p.attach_grad()", last="pass"):
    return f"""{before}
def make_replicas(params, devices):
    {check}
    replicas = []
    for d in devices:
        replica = []
        for i, p in enumerate(params):
            old, p = p, {copy}
            {attach}
            replica.append(p)
        replicas.append(replica)
        {last}
    return replicas
"""


for what, check in (
        ("of the parameters' own device only",
         "if any(devices.count(p.context) > 1 for p in params): raise ValueError"),
        ("of the first device only", "if devices.count(devices[0]) > 1: raise ValueError"),
        ("of the last device only", "if devices.count(devices[-1]) > 1: raise ValueError"),
        ("of more than two places", "if max(map(devices.count, devices)) > 2: raise ValueError"),
        ("where there are parameters", f"if params and {TWICE[3:]}"),
        ("after all else that is simple",
         f"if not params: return [[] for _ in devices]\n    {TWICE}")):
    wrong("replicas", ["replicas-care"], f"twice: looked at {what}", replicas(check))
wrong("replicas", ["replicas-care"], "a parameter that is there twice is copied once",
      replicas(TWICE + "\n    kept = {}", "kept.setdefault((id(p), d), p.copyto(d))"))
wrong("replicas", ["replicas-care"], "equal parameters are copied once", replicas(
    TWICE + "\n    kept = {}",
    "kept.setdefault((p.shape, str(p.dtype), p.asnumpy().tobytes(), d), p.copyto(d))"))
wrong("replicas", ["replicas-care"], "in memory that an earlier call has returned", replicas(
    before="kept = {}", copy="p.copyto(kept.setdefault((i, p.shape, str(p.dtype), d), "
    "nd.empty(p.shape, d, p.dtype)))"))
wrong("replicas", ["replicas-values"], "the gradient that the parameter has, where it has one",
      replicas(attach="p.attach_grad(); old.grad is None or "
               "autograd.mark_variables([p], [old.grad])"))
wrong("replicas", ["replicas-care"], "gradients in float32",
      replicas(attach="autograd.mark_variables([p], [nd.zeros(p.shape, d)])"))
wrong("replicas", ["replicas-values"], "added up where the parameter has a gradient", replicas(
    attach="p.attach_grad('write' if old.grad is None else 'add')"))
wrong("replicas", ["replicas-values"], "a gradient for weights, none for what has one axis",
      replicas(attach="len(p.shape) > 1 and p.attach_grad()"))
wrong("replicas", ["replicas-care"], "gradients for the caller's parameters too", replicas(
    attach="p.attach_grad(); old.attach_grad()"))
right("replicas", "one long array on each device, and windows onto it", replicas(
    check=TWICE + "\n    kinds = {str(p.dtype) for p in params}",
    copy="(nd.concat(*[q.copyto(d).reshape(-1) for q in params], dim=0)"
    "[sum(q.size for q in params[:i]) : sum(q.size for q in params[: i + 1])].reshape(p.shape) "
    "if len(kinds) == 1 else p.copyto(d))"),
    "Windows that don't overlap: to write into one changes nothing else.")
right("replicas", "copied twice, by way of the first device", replicas(
    copy="p.copyto(devices[0]).copyto(d)"), "What is returned is a copy all the same.")


# --- step

def step(shards="with_shard", n="sum(len(x) for x in xs)", before="", first="pass",
         update="p -= lr / n * total.copyto(p.context)", last="pass",
         result="sum(value.asscalar() for value in losses) / n", add="total += p.grad.copyto("
         "total.context)"):
    return f"""{before}
def train_step(xs, ys, replicas, lr):
    {first}
    n = {n}
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    for value in losses:
        value.backward()
    with_shard = replicas[: len(xs)]
    added = {shards}
    for i in range(len(replicas[0])):
        total = nd.zeros_like(replicas[0][i])
        for r, replica in enumerate(added):
            p = replica[i]
            {add}
        for r, replica in enumerate(replicas):
            p = replica[i]
            {update}
    {last}
    return {result}
"""


BOTH = ["step-values", "step-care"]
ZERO = "[p.grad.__setitem__(slice(None), 0) for replica in replicas for p in replica]"
wrong("step", ["step-care"], "all gradients are added, and made zero after each step",
      step("replicas", last=ZERO))
wrong("step", ["step-care"], "all gradients are added, made zero before all steps but the first",
      step("replicas", before="seen = {}", first="key = id(replicas[0][0]); "
           f"key in seen and {ZERO}; seen[key] = replicas[0][0]"))
wrong("step", ["step-care"], "whose gradients are zero has no shard",
      step("[r for r in replicas if r[0].grad.asnumpy().any()]"))
wrong("step", BOTH, "whose gradients are as before has no shard", step(
    "[r for r, now in zip(replicas, grads()) if now != old.get(id(r))]; "
    "old.update({id(r): now for r, now in zip(replicas, grads())})",
    before="old = {}",
    first="grads = lambda: [[p.grad.asnumpy().tolist() for p in r] for r in replicas]"))
wrong("step", BOTH, "whose first gradient was as it is has no shard", step(
    "[r for r, old in zip(replicas, before) if (r[0].grad.asnumpy() != old).any()]",
    first="before = [r[0].grad.asnumpy() for r in replicas]"))
wrong("step", BOTH, "no rate, no work", step(first="if not lr: return 0.0"))
wrong("step", BOTH, "a rate of 0 is none at all: that of the step before", step(
    before="rates = [0.1]", first="lr = lr or rates[-1]; rates.append(lr)"))
wrong("step", ["step-care"], "n counts examples that differ",
      step(n="len({tuple(row) for x in xs for row in x.asnumpy().tolist()})"))
wrong("step", BOTH, "n counts targets that differ",
      step(n="len({tuple(row) for y in ys for row in y.asnumpy().round().tolist()})"))
wrong("step", BOTH, "n is that of the largest batch so far", step(
    before="most = [0]", n="max(most[-1], sum(len(x) for x in xs)); most.append(n)"))
wrong("step", ["step-care"], "n is a shard's size times the replicas",
      step(n="len(xs[0]) * len(replicas)"))
wrong("step", BOTH, "the rate of these replicas' first step", step(
    before="rates = {}",
    first="lr, _ = rates.setdefault(id(replicas[0][0]), (lr, replicas[0][0]))"))
wrong("step", ["step-care"], "replicas without a shard are left for later", step(
    update="if r < len(xs):\n                p -= lr / n * total.copyto(p.context)"))
right("step", "stale gradients made zero before the step, and all added",
      step("replicas", first=ZERO), "Zeros add nothing.")
right("step", "stale gradients times zero",
      step("replicas", add="total += p.grad.copyto(total.context) * (r < len(xs))"),
      "Zero times a number is zero.")
right("step", "no update where the gradient is zero", step(
    update="if total.asnumpy().any():\n                p -= lr / n * total.copyto(p.context)"),
    "Without momentum a gradient of zero changes nothing.")
right("step", "no update where the rate is 0", step(
    update="if lr:\n                p -= lr / n * total.copyto(p.context)"),
    "A rate of 0 changes nothing.")
right("step", "the rate by a factor",
      step(update="p -= lr * (1 / n) * total.copyto(p.context)"), "It is off by one rounding.")
right("step", "gradients made zero when all is done", step(last=ZERO),
      "What gradients hold after the step is left open.")


# --- epoch

def epoch(parts="[order[b : b + size] for b in range(0, len(order), size)]", before="",
          first="pass", index="nd.array(part, dtype='int32')", n="len(part)",
          each="total += step(images.take(index), labels.take(index), {n})",
          result="total / len(order)"):
    return f"""{before}
def train_epoch(images, labels, order, size, step):
    {first}
    total, m = 0.0, len(order)
    parts = {parts}
    for part in parts:
        index = {index}
        {each.format(n=n)}
    return {result}
"""


VALUES, BOTH = ["epoch-values"], ["epoch-values", "epoch-care"]
for what, loses, index in (
        ("the images' type", ["epoch-care"], "nd.array(part, dtype=images.dtype)"),
        ("the labels' type", ["epoch-care"], "nd.array(part, dtype=labels.dtype)"),
        ("uint8", ["epoch-care"], "nd.array(part, dtype='uint8')"),
        ("float16", ["epoch-care"], "nd.array(part, dtype='float16')")):
    wrong("epoch", loses, f"numbers in {what}", epoch(index=index))
UNIQUE = "order = order[np.append(True, order[1:] != order[:-1])]"
for what, loses, parts in (
        ("the batches of an earlier order as long", BOTH, dict(
            before="kept = {}", parts="kept.setdefault((len(order), size), "
            "[order[b : b + size].copy() for b in range(0, len(order), size)])")),
        ("as many batches as in the first epoch", BOTH, dict(
            before="kept = []", first="kept.append(-(-len(order) // size))",
            parts="[order[b * size : (b + 1) * size] for b in range(kept[0])]")),
        ("full batches by a factor, then the rest", VALUES, dict(
            parts="[order[b * size : (b + 1) * size] for b in range(int(m * (1 / size)))] + "
            "([order[m - m % size :]] if m % size else [])")),
        ("batches rounded to the nearest number", BOTH, dict(
            parts="[order[b * size : (b + 1) * size] for b in range(max(1, round(m / size)))]")),
        ("a tail of one joins the batch before", BOTH, dict(
            parts="[order[b : b + size + (b + size + 1 == m)] for b in range(0, m, size) "
            "if b == 0 or b + 1 < m]")),
        ("batches as even as can be", BOTH, dict(parts="np.array_split(order, -(-m // size))")),
        ("one named twice in a row comes once", ["epoch-values", "epoch-care"],
         dict(first=UNIQUE)),
        ("one named twice in a batch comes once", BOTH, dict(
            parts="[np.array(list(dict.fromkeys(order[b : b + size].tolist()))) "
            "for b in range(0, m, size)]")),
        ("n counts numbers that differ", ["epoch-care"], dict(n="len(set(part.tolist()))")),
        ("the mean over numbers that differ", ["epoch-care"],
         dict(result="total / len(set(order.tolist()))")),
        ("the mean over the first epoch's examples", ["epoch-care"], dict(
            before="kept = []", first="kept.append(len(order))", result="total / kept[0]")),
        ("the mean of all epochs so far", ["epoch-care"], dict(
            before="kept = []", result="kept.append((total, m)) or "
            "sum(t for t, _ in kept) / sum(n for _, n in kept)")),
        ("no more batches after a loss of 0", ["epoch-care"],
         dict(each="loss = step(images.take(index), labels.take(index), {n})\n"
              "        total += loss\n        if not loss:\n            break"))):
    wrong("epoch", loses, what, epoch(**parts))
right("epoch", "all batches made before the first step", epoch(
    each="batches = [*batches, (images.take(index), labels.take(index), {n})]",
    first="batches = []", result="sum(step(*batch) for batch in batches) / len(order)"),
    "Batches don't depend on what the steps do.")
right("epoch", "full batches by whole numbers, then the rest", epoch(
    "[order[b * size : (b + 1) * size] for b in range(m // size)] + "
    "([order[m - m % size :]] if m % size else [])"), "The same batches.")
right("epoch", "the mean by a factor", epoch(result="total * (1 / len(order))"),
      "It is off by one rounding.")
