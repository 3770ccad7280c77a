"""The numbers of `notebooks/map.md`: bytes, seconds, and pipelines, simulated.

Run it to print the numbers. tests/course/test_map.py holds the page to them.
"""

PEAK, NVLINK, CARD = 312e12, 300e9, 25e9  # an A100's operations, and bytes sent, a second


def bytes_of_two_matrices(k=2, sequences=8, tokens=4096, width=4096, e=2):
    """`{way: (bytes that a device sends in a step, bytes of weights that it holds)}`.

    For two matrices of `width` x `width`, one after the other, on `k` devices in a ring.
    """
    ring = 2 * (k - 1) / k  # times its size, an all-reduce makes each device send
    weights = 2 * width * width * e
    sequence = tokens * width * e
    return {
        "data": (ring * weights, weights),
        "tensor": (2 * ring * sequence * sequences, weights / k),  # forward and backward
    }


def bytes_sent(k=8, m=8, b=1, s=4096, h=4096, L=32, e=2):
    """`{way: bytes that a device sends in a step}` on `k` devices in rings.

    The step has `m` micro-batches of `b` sequences of `s` tokens; the transformer `L` layers of
    width `h`, so N = 12 L h^2 parameters; a number takes `e` bytes. With experts each device has
    attention's 4 L h^2, and in each layer one of `k` MLPs; a token visits one.
    """
    once, weights, tokens = (k - 1) / k, 12 * L * h**2 * e, b * s * h * e
    return {
        "data": 2 * once * weights,
        "sharded data": 3 * once * weights * (m / k),
        "tensor": 4 * 2 * once * tokens * L * m,
        "sequence": 5 * 2 * once * tokens * L * m,
        "context": 3 * 2 * (k - 1) * (tokens / k) * L * m + 2 * once * weights,
        "pipeline": 2 * tokens * m,
        "expert": 4 * once * tokens * L * (m / k) + 2 * once * weights / 3,
    }


def activations(b=1, s=4096, h=4096, L=32, heads=32):
    """Bytes of a micro-batch's activations: what the layers keep, their inputs, and the scores."""
    return {"kept": 34 * b * s * h * L, "inputs": 2 * b * s * h * L,
            "scores": 5 * heads * b * s**2 * L}


def bytes_held(k=8, b=1, s=4096, h=4096, L=32):
    """`{way: bytes of memory on the device that has most}`, for weights and activations.

    A weight needs 16 bytes with its gradient and Adam's state, in mixed precision; of the 34 bsh
    bytes that a layer keeps, tensor parallelism cuts all but 10 bsh.
    """
    weights, kept = 16 * 12 * L * h**2, activations(b, s, h, L)["kept"]
    return {
        "data": weights + kept,
        "sharded data": weights / k + kept,
        "tensor": weights / k + (10 + 24 / k) / 34 * kept,
        "sequence": (weights + kept) / k,
        "context": weights + kept / k,
        "pipeline": weights / k + kept,
        "expert": weights + kept,
    }


def bytes_of_experts(k=8, b=1, s=4096, h=4096, L=32):
    """Bytes of memory of one device that has all `k` experts of each layer."""
    return 16 * (4 + 8 * k) * L * h**2 + activations(b, s, h, L)["kept"]


def seconds_computing(k=8, m=8, b=1, s=4096, h=4096, L=32, rate=PEAK / 2):
    """Seconds for a device's share of the step, at `rate` operations a second.

    A weight needs 2 for each token forward, 4 backward; attention's scores are left out.
    """
    return 6 * 12 * L * h**2 * b * s * (m / k) / rate


def bubble(p, m):
    """The share of the time that each of `p` stages is idle, with `m` micro-batches."""
    return (p - 1) / (m + p - 1)


def order(schedule, stage, stages, micro):
    """What a stage does, one after the other: `[("F" or "B", micro-batch), ...]`."""
    forward, backward = ([(kind, i) for i in range(micro)] for kind in "FB")
    ahead = {"GPipe": micro, "1F1B": min(stages - 1 - stage, micro)}[schedule]
    steady = [each for pair in zip(forward[ahead:], backward) for each in pair]
    return forward[:ahead] + steady + backward[micro - ahead :]


def simulate(schedule, stages, micro, backward=2):
    """`[(stage, "F" or "B", micro-batch, start, end), ...]`; a forward pass takes 1, messages 0.

    A stage does one thing at a time, in its `order`. A forward pass needs the one before it in the
    pipeline; a backward pass the one after it, and its own stage's forward pass.
    """
    todo = [order(schedule, stage, stages, micro) for stage in range(stages)]
    free, ended, events, before = [0] * stages, {}, [], -1
    while any(todo) and len(events) > before:  # a schedule that waits for itself ends early
        before = len(events)
        for stage in filter(todo.__getitem__, range(stages)):
            kind, i = todo[stage][0]
            needs = [("F", i, stage - 1)] * (stage > 0)
            if kind == "B":
                needs = [("F", i, stage)] + [("B", i, stage + 1)] * (stage < stages - 1)
            if set(needs) <= set(ended):
                start = max([free[stage], *(ended[need] for need in needs)])
                free[stage] = ended[kind, i, stage] = start + (backward if kind == "B" else 1)
                events.append((stage, *todo[stage].pop(0), start, free[stage]))
    return events


def idle(events):
    """The share of the stages' time, from the first start to the last end, without work."""
    stages, whole = 1 + max(stage for stage, *_ in events), max(end for *_, end in events)
    return 1 - sum(end - start for *_, start, end in events) / stages / whole


def kept(events):
    """For each stage, how many micro-batches' activations it keeps at most."""
    now, most = {}, {}
    for stage, kind, *_ in sorted(events, key=lambda event: event[3]):
        now[stage] = now.get(stage, 0) + (1 if kind == "F" else -1)
        most[stage] = max(most.get(stage, 0), now[stage])
    return [most[stage] for stage in sorted(most)]


def main():
    """Print bytes, and seconds over two links of an A100."""
    for way, (sent, weights) in bytes_of_two_matrices().items():
        print(f"two matrices, {way}: {sent / 1e6:.1f} MB sent, {weights / 1e6:.1f} MB held")
    for way, sent in bytes_sent().items():
        print(f"{way:12} {sent / 1e9:4.1f} GB: {sent / NVLINK:.3f} s or {sent / CARD:.3f} s of "
              f"{seconds_computing():.2f}; memory {bytes_held()[way] / 1e9:.0f} GB")
    print(f"experts uncut {bytes_of_experts() / 1e9:.0f} GB; of a micro-batch's activations",
          *(f"{name} {size / 1e9:.1f} GB" for name, size in activations().items()))


if __name__ == "__main__":
    main()
