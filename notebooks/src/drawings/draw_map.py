"""The drawings and the numbers of `notebooks/map.md`.

Run it to write cuts.svg and pipeline.svg beside it, the same bytes each time, and to print bytes.
"""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

BLUE, ORANGE = "#0072B2", "#E69F00"  # as in helpers/plotting.py
OTHERS = ("#e6e6e6", "#d0d0d0", "#b8b8b8")  # devices 2, 3 and 4
WAYS = {  # and the axes that each cuts
    "data": "sequences", "sharded data": "sequences, and weights", "tensor": "width",
    "sequence": "width, tokens elsewhere", "context": "tokens", "pipeline": "layers",
    "expert": "sequences, and experts"}
ONE = ("tensor", "sequence", "context")  # the ways whose box of activations has one micro-batch
BANDS = ((0.0, 0.25), (0.25, 1.0))  # of a layer's height: a thin part (see `owner`), and the rest
PEAK, NVLINK, CARD = 312e12, 300e9, 25e9  # an A100's operations, and bytes sent, a second


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


def owner(way, weights, layer, band, column, depth):
    """The device (from 0) that holds a cell of the weights or of the activations; None if all do.

    `layer`, `column` (of the width) and `depth` (in the batch) count from 0 to 3; `band` 0 is the
    thin part of a layer (activations of tensor and sequence: of norms, dropout, and the inputs of
    attention and MLP; weights of expert: attention's).
    """
    if way == "pipeline":
        return layer
    if weights:
        return None if way in ("data", "context") or (way, band) == ("expert", 0) else column
    if way in ("tensor", "sequence") and band == 1:
        return column
    return None if way == "tensor" else depth


def held(way, weights):
    """The share of the weights, or of the activations, that device 1 of four holds."""
    cells = [(band, owner(way, weights, layer, band, column, depth) in (None, 0))
             for layer in range(4) for band in (0, 1) for column in range(4) for depth in range(4)]
    return sum(mine * (BANDS[band][1] - BANDS[band][0]) for band, mine in cells) / 64


def draw_box(ax, way, weights, x, back):
    """Draw the sides that show, at `x`: each cell in its owner's colour, then the edges."""
    cells = {}
    for i in range(4):
        for j in range(4):
            sides = [((0, 0, i, j), ((i, 4, j), (i + 1, 4, j), (i + 1, 4, j + 1), (i, 4, j + 1)))]
            for band, (low, high) in enumerate(BANDS):
                t, u = 4 - i - low, 4 - i - high
                front = (j, t, 0), (j + 1, t, 0), (j + 1, u, 0), (j, u, 0)
                right = (4, t, j), (4, t, j + 1), (4, u, j + 1), (4, u, j)
                sides += [((i, band, j, 0), front), ((i, band, 3, j), right)]
            for cell, corners in sides[1::2] if weights else sides:
                corners = [(x + a + back[0] * d, c + back[1] * d) for a, c, d in corners * 2][:5]
                color = (*OTHERS, BLUE)[(owner(way, weights, *cell) or 0) - 1]
                cells.setdefault(color, []).append(Outline(corners, closed=True))
    for color, outlines in cells.items():
        ax.add_patch(PathPatch(Outline.make_compound_path(*outlines), fc=color, ec=color, lw=0.3))
    a, c = x + 4 * back[0], 4 * back[1]
    ax.plot((x + 4, x + 4, x, x, x + 4, a + 4, a, x, x, x + 4, a + 4, a + 4),
            (4, 0, 0, 4, 4, c + 4, c + 4, 4, 0, 0, c, c + 4), color="black", lw=0.6)


def draw_cuts():
    """What device 1 of four holds in each of the seven ways."""
    whole = " and ".join(way for way in WAYS if held(way, weights=True) == 1)
    fig = Figure(figsize=(7.6, 3.9))
    fig.suptitle(f"Only {whole} parallelism keep all weights on every device", y=0.965)
    for place, way in enumerate([*WAYS, "device 1 in blue"]):
        ax = fig.add_axes([0.015 + 0.248 * (place % 4), 0.43 - 0.425 * (place // 4), 0.24, 0.43])
        ax.set(xlim=(-0.1, 11.2), ylim=(-1.9, 7.5), aspect="equal")
        ax.axis("off")
        words = [(0, 6.7, way, 9), (0, 5.8, WAYS.get(way, "devices 2, 3 and 4 in grey"), 7)]
        if way in WAYS:
            draw_box(ax, way, True, 0, (0, 0))
            draw_box(ax, way, False, 5.2, (0.4, 0.3))
            count = "1 micro-batch" if way in ONE else "4 micro-batches"
            words += [(0, -0.8, "weights", 7), (5.2, -0.8, "activations of", 7),
                      (5.2, -1.6, count, 7)]
            if way == "sharded data":
                words.append((0, -1.6, "between uses", 7))
        else:
            for x, y in ((4, 3), (1, 0), (2.8, 4.5)):  # layer 1 is on top
                ax.annotate("", (x, y), (1, 3), arrowprops={"arrowstyle": "->", "lw": 0.8})
            words += [(4.1, 2.8, "width", 7), (0, -0.8, "layers", 7),
                      (3, 4.4, "sequences, tokens", 7)]
        for x, y, text, size in words:
            ax.text(x, y, text, fontsize=size, weight="bold" if size == 9 else "normal")
    return fig


def draw_pipeline(p=4, m=8):
    """What each of `p` stages does when, with `m` micro-batches, under GPipe and 1F1B."""
    runs = {schedule: simulate(schedule, p, m) for schedule in ("GPipe", "1F1B")}
    fig = Figure(figsize=(7.6, 4.4))
    fig.suptitle(",\n".join(f"{name} idles for {100 * idle(run):.0f} % of the time and keeps up to "
                            f"{max(kept(run))} micro-batches" for name, run in runs.items()))
    for row, (schedule, events) in enumerate(runs.items()):
        ax = fig.add_axes([0.08, 0.54 - 0.42 * row, 0.87, 0.29], facecolor="#f0f0f0")
        for stage, kind, i, start, end in events:
            color, height, ink = (BLUE, 0.9, "white") if kind == "F" else (ORANGE, 0.6, "black")
            ax.barh(stage, end - start, height, start, fc=color, ec="white", lw=0.6)
            ax.text((start + end) / 2, stage + 0.1, i + 1, color=ink, fontsize=7, ha="center")
        ax.set(xlim=(0, max(end for *_, end in events)), ylim=(p - 0.5, -0.5))
        ax.set_yticks(range(p), [f"stage {stage + 1}" for stage in range(p)])
        ax.set_title(f"{schedule}: stages 1 to {p} keep {str(kept(events))[1:-1]}", loc="left")
    ax.set_xlabel("time in forward passes of one stage; blue, tall: forward, orange, low: backward")
    return fig


def main(folder=Path(__file__).parent):
    """Write both drawings into `folder`, and print bytes, and seconds over two links of an A100."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "map", "figure.titlesize": 11, "font.size": 8})
        for name, figure in (("cuts", draw_cuts()), ("pipeline", draw_pipeline())):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    for way, sent in bytes_sent().items():
        print(f"{way:12} {sent / 1e9:4.1f} GB: {sent / NVLINK:.3f} s or {sent / CARD:.3f} s of "
              f"{seconds_computing():.2f}; memory {bytes_held()[way] / 1e9:.0f} GB")
    print(f"experts uncut {bytes_of_experts() / 1e9:.0f} GB; of a micro-batch's activations",
          *(f"{name} {size / 1e9:.1f} GB" for name, size in activations().items()))


if __name__ == "__main__":
    main()
