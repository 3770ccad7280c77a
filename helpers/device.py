"""Devices for a chapter to work on: GPUs where there are enough, else simulated on CPU cores.

MXNet gives every CPU context (`cpu(0)`, `cpu(1)`, ...) a worker thread and a queue of its own.
With `helpers.engine`'s settings each keeps one core busy, so they behave as small devices do:
work on different contexts runs at the same time. They share the host's memory, though, which
GPUs don't.
"""

import numbers
import warnings

import mxnet as mx

from helpers import gpu
from helpers.engine import cores, is_on

MOST = 64  # each context that is used starts a thread and keeps scratch space


def devices(k=None):
    """k different MXNet contexts; prints a line that says which, at each call.

    GPUs where the machine has at least k of them; else `cpu(0)` to `cpu(k-1)`, each one core.
    With `k=None`: every GPU, or, without GPUs, two simulated devices. The variable
    `COURSE_SIMULATE=1` asks for simulated devices on a machine with GPUs too. A GPU for which
    MXNet 1.9.1 has no machine code is left out, with a line that says so.

    Raises TypeError where k is not a whole number, ValueError where it is below 1 or above 64, or
    that variable neither 1 nor 0.
    Warns where k simulated devices must share fewer cores.
    """
    gpus = [] if is_on("COURSE_SIMULATE") else _gpus()
    if k is None:
        k = len(gpus) or 2
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise TypeError(f"devices(k={k!r}): k must be a whole number of devices, such as 2")
    if not 1 <= k <= MOST:
        raise ValueError(f"devices(k={k}): k must be from 1 to {MOST}")
    if len(gpus) >= k:
        chosen = [mx.gpu(i) for i in gpus[:k]]
        print(f"{_count(k, 'GPU')}: {', '.join(map(str, chosen))}")
        return chosen
    chosen = [mx.cpu(i) for i in range(k)]
    have = cores()
    share = "one core each" if k <= have else f"sharing {_count(have, 'core')}"
    print(f"{_count(k, 'simulated device')}: {', '.join(map(str, chosen))}, {share}")
    if k > have:
        warnings.warn(
            f"devices(k={k}): this process may use {_count(have, 'core')}, so speed-ups flatten "
            f"beyond k={have}; results stay right",
            stacklevel=2,
        )
    return chosen


def _gpus():
    """The numbers of the GPUs that MXNet can see and use."""
    seen = range(mx.context.num_gpus())
    try:
        cards = gpu.cards() if seen else []
    except gpu.NoDriver:
        return list(seen)
    for i, card in zip(seen, cards):
        if not card.usable:
            print(f"gpu({i}) is left out: MXNet 1.9.1 has no machine code for {card}")
    return [i for i, card in zip(seen, cards) if card.usable]


def _count(n, noun):
    return f"{n} {noun}" + ("s" if n != 1 else "")
