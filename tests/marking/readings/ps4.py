"""Other readings of assignment 4. See `test_readings`.

Solutions are put together from what is made zero and when, where shards end, what counts into a
norm, and what a clipped step does where there is nothing to clip.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- gradients

TWICE = "if len(set(devices)) < len(devices): raise ValueError"
ENDS = "[i * (n // k) + min(i, n % k) for i in range(k + 1)]"
ZERO = "for p in parameters: p.zero_grad()"


def gradients(check=TWICE, zero=ZERO, ends=ENDS, result="p.grad(d).copy()", before="",
              after="pass", last="pass"):
    return f"""{before}
def device_gradients(net, x, y, devices):
    n, k = len(x), len(devices)
    parameters = list(net.collect_params().values())
    {check}
    {zero}
    ends, losses = {ends}, []
    with autograd.record():
        for a, b, d in zip(ends, ends[1:], devices):
            if a < b:
                losses.append(squared(net(x[a:b].copyto(d)), y[a:b].copyto(d)))
    autograd.backward(losses)
    {after}
    found = [[{result} for i, d in enumerate(devices)] for p in parameters]
    {last}
    return found
"""


BOTH = ["gradients-values", "gradients-care"]
for what, check in (
        ("where there is an example for each", "if n >= k and len(set(devices)) < k: "
         "raise ValueError"),
        ("where there are fewer examples", "if n <= k and len(set(devices)) < k: "
         "raise ValueError"),
        ("of the first device only", "if devices.count(devices[0]) > 1: raise ValueError"),
        ("of neighbours, first and last among them",
         "if k > 1 and any(a == b for a, b in zip(devices, devices[1:] + devices[:1])): "
         "raise ValueError")):
    wrong("gradients", ["gradients-care"], f"twice: looked at {what}", gradients(check))
for what, zero in (
        ("from the second call on",
         "for p in parameters:\n        if net in seen: p.zero_grad()\n    seen.append(net)"),
        ("after a batch that had a longer one before",
         "if seen and seen[-1] > n:\n        for p in parameters: p.zero_grad()\n"
         "    seen.append(n)"),
        ("where two devices have no shard",
         "for p in parameters:\n        if n < k - 1: p.zero_grad()"),
        ("on the last device",
         "for p in parameters:\n        if n < k: p.grad(devices[-1])[:] = 0"),
        ("on the first device without a shard",
         "for p in parameters:\n        if n < k: p.grad(devices[n])[:] = 0")):
    wrong("gradients", ["gradients-care"], f"zero {what}", gradients(zero=zero, before="seen = []"))
wrong("gradients", ["gradients-care"], "zero in what is returned, the network as after the batch",
      gradients(zero="pass", result="p.grad(d).copy() * (i < n)"))
wrong("gradients", ["gradients-care"], "zero in the network once all is returned",
      gradients(last=ZERO))
wrong("gradients", ["gradients-care"], "in arrays that an earlier call has returned", gradients(
    before="kept = {}", result="p.grad(d).copyto(kept.setdefault((parameters.index(p), "
    "p.shape, d), nd.empty(p.shape, d, 'float64')))"))
wrong("gradients", ["gradients-care"], "those of an earlier batch as long", gradients(
    before="kept = {}", last="found = [[g.copy() for g in r] for r in "
    "kept.setdefault((net, n), found)]"))
wrong("gradients", ["gradients-care"], "added to those of the batch before", gradients(
    zero="for p in parameters: p.grad_req = 'add'"))
for what, loses, ends in (
        ("rounded up", BOTH, "[-(-i * n // k) for i in range(k + 1)]"),
        ("rounded to the nearest", BOTH, "[round(i * n / k) for i in range(k + 1)]"),
        ("by a factor, which rounds", ["gradients-care"],
         "[i * int(n * (1 / k)) + min(i, n % k) for i in range(k + 1)]")):
    wrong("gradients", loses, f"shards end {what}", gradients(ends=ends))
right("gradients", "added up, onto zeros", gradients(
    zero="for p in parameters: p.grad_req = 'add'; p.zero_grad()"),
    "Added to zero it is that batch's; how the network takes later gradients is left open.")
right("gradients", "zero by writing, where there is no shard", gradients(
    zero="for p in parameters:\n        for d in devices[n:]: p.grad(d)[:] = 0"),
    "Where there is a shard, backward overwrites.")
right("gradients", "zero after the backward, where there is no shard", gradients(
    zero="pass",
    after="for p in parameters:\n        for d in devices[n:]: p.grad(d)[:] = 0"),
    "Whoever has no shard gets nothing from backward.")


# --- norm

def norm(total="sum(g.asnumpy().astype('float64') for g in replicas)", before="", first="pass",
         result="float(np.sqrt(sum((t**2).sum() for t in totals)) / n)",
         totals="[{} for replicas in gradients]"):
    return f"""{before}
def mean_norm(gradients, n):
    {first}
    totals = {totals.format(total)}
    return {result}
"""


BOTH = ["norm-values", "norm-care"]
for what, loses, parts in (
        ("parameters of one shape are one", BOTH, dict(
            totals="{{replicas[0].shape: {} for replicas in gradients}}.values()")),
        ("equal gradients of parameters count once", ["norm-values"], dict(
            totals="{{str([g.asnumpy().tolist() for g in replicas]): {} "
            "for replicas in gradients}}.values()")),
        ("equal gradients of devices count once", BOTH, dict(
            first="one = lambda rs: {str(r.asnumpy().tolist()): r for r in rs}.values()",
            total="sum(g.asnumpy().astype('float64') for g in one(replicas))")),
        ("where all devices have the same, it is the sum already", ["norm-values"], dict(
            first="gradients = [r[:1] for r in gradients] if all((r[0].asnumpy() == g.asnumpy())"
            ".all() for r in gradients for g in r[1:]) else gradients")),
        ("gradients of zero are devices that don't count", ["norm-values"], dict(
            first="busy = sum(any(r[i].asnumpy().any() for r in gradients) "
            "for i in range(len(gradients[0]))) or 1",
            result="float(np.sqrt(sum((t**2).sum() for t in totals)) / n) "
            "* len(gradients[0]) / busy")),
        ("n is 2 at least", BOTH, dict(
            result="float(np.sqrt(sum((t**2).sum() for t in totals)) / max(2, n))")),
        ("the type of most for all", ["norm-care"], dict(
            first="kind = gradients[0][0].dtype",
            total="sum(g.asnumpy().astype(kind) for g in replicas).astype('float64')")),
        ("n in float32", BOTH, dict(
            result="float(np.sqrt(sum((t**2).sum() for t in totals)) * np.float32(1 / n))")),
        ("that of an earlier call with gradients of these shapes", ["norm-values"], dict(
            before="kept = {}", result="kept.setdefault((str([r[0].shape for r in gradients]), "
            "len(gradients[0]), n), float(np.sqrt(sum((t**2).sum() for t in totals)) / n))"))):
    wrong("norm", loses, what, norm(**parts))
right("norm", "divided by n before the squares", norm(
    result="float(np.sqrt(sum(((t / n) ** 2).sum() for t in totals)))"), "Off by a rounding.")
right("norm", "divided by n before the sum", norm(
    total="sum(g.asnumpy().astype('float64') / n for g in replicas)",
    result="float(np.sqrt(sum((t**2).sum() for t in totals)))"), "Off by a rounding.")
right("norm", "n by a factor", norm(
    result="float(np.sqrt(sum((t**2).sum() for t in totals)) * (1 / n))"), "Off by a rounding.")
right("norm", "zeros are returned early", norm(
    first="if not any(g.asnumpy().any() for r in gradients for g in r): return 0.0"),
    "The norm of zeros is 0.")


# --- step

def step(clip="norm > theta", factor="theta / norm", before="", first="trainer.allreduce_grads()",
         early="pass", update="trainer.update(n)", scale="g *= {}", last="pass"):
    return f"""{before}
def clipped_step(net, trainer, n, theta):
    {first}
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((r[0].asnumpy() ** 2).sum() for r in sums)) / n)
    {early}
    if {clip}:
        for replicas in sums:
            for i, g in enumerate(replicas):
                {scale.format(factor)}
    {update}
    {last}
    return norm
"""


BOTH = ["step-values", "step-care"]
for what, loses, parts in (
        ("no update where the norm is 0", ["step-care"],
         dict(early="if norm == 0: return norm")),
        ("no update where gradients are near 0", ["step-care"],
         dict(early="if norm < 1e-9: return norm")),
        ("no update where the weights would stay, seen from gradients", BOTH,
         dict(update="if any(r[0].asnumpy().any() for r in sums): trainer.update(n)")),
        ("no update where the limit is 0", ["step-values"],
         dict(early="if not theta: return norm")),
        ("a limit of 0 is none", ["step-values"], dict(clip="theta and norm > theta")),
        ("the whole step where it isn't clipped", ["step-care"],
         dict(early="if norm <= theta: trainer.step(n); return norm")),
        ("the lowest factor so far", BOTH, dict(
            before="lowest = [1]", early="if norm: lowest[0] = min(lowest[0], theta / norm)",
            clip="True", factor="lowest[0]")),
        ("the highest norm so far", BOTH, dict(
            before="highest = [0]", early="highest[0] = max(highest[0], norm)",
            clip="highest[0] > theta", factor="theta / highest[0]")),
        ("the limit shrinks with each clipped step", BOTH, dict(
            before="limits = {}", early="theta = limits.get(id(trainer), theta)",
            last="limits[id(trainer)] = theta * (theta / norm if norm > theta else 1)")),
        ("the first limit for all steps", BOTH, dict(
            before="limits = {}", early="theta = limits.setdefault(trainer, theta)")),
        ("the first step isn't clipped", BOTH, dict(
            before="seen = []", clip="norm > theta and id(trainer) in seen",
            last="seen.append(id(trainer))")),
        ("no step is clipped after one that wasn't", ["step-care"], dict(
            before="done = {}", clip="norm > theta and done.get(trainer, True)",
            last="done[trainer] = norm > theta")),
        ("whose own gradient is zero isn't scaled", ["step-values"], dict(
            first="busy = [any(p.list_grad()[i].asnumpy().any() for p in "
            "net.collect_params().values()) for i in range(len(net[0].weight.list_ctx()))]\n"
            "    trainer.allreduce_grads()",
            scale="g *= ({} if busy[i] else 1)")),
        ("not summed where the first device has nothing", ["step-values"], dict(
            first="if any(p.list_grad()[0].asnumpy().any() for p in "
            "net.collect_params().values()): trainer.allreduce_grads()")),
        ("not summed where a device has nothing", ["step-values"], dict(
            first="if all(any(p.list_grad()[i].asnumpy().any() for p in "
            "net.collect_params().values()) for i in range(len(net[0].weight.list_ctx()))): "
            "trainer.allreduce_grads()")),
        ("what weights change by is scaled, not gradients", BOTH, dict(
            early="old = [[w.copy() for w in p.list_data()] for p in "
            "net.collect_params().values()]", clip="False",
            last="f = theta / norm if norm > theta else 1\n"
            "    for p, ws in zip(net.collect_params().values(), old):\n"
            "        for w, v in zip(p.list_data(), ws):\n"
            "            w[:] = v + f * (w - v)")),
        ("momentum is forgotten where it is clipped", BOTH, dict(
            early="norm > theta and trainer._updaters and "
            "[u.states.clear() for u in trainer._updaters]")),
        ("momentum is forgotten where there is nothing to clip", ["step-care"], dict(
            early="norm == 0 and [u.states.clear() for u in trainer._updaters]"))):
    wrong("step", loses, what, step(**parts))
right("step", "returns early below the limit", step(
    early="if norm <= theta: trainer.update(n); return norm"), "There is nothing else to do.")
right("step", "returns early where the norm is 0, after the update", step(
    early="if not norm: trainer.update(n); return 0.0"), "There is nothing to clip.")
right("step", "an update that stale gradients may take part in",
      step(update="trainer.update(n, ignore_stale_grad=True)"),
      "Every device has run its backward, so no gradient is stale.")
right("step", "no sum where there is one device", step(
    first="if len(net[0].weight.list_ctx()) > 1: trainer.allreduce_grads()"),
    "The sum of one is that one.")
