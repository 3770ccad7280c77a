"""One look for the course's figures: size, palette and alternative text."""

import io

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

# Okabe and Ito's palette (2008), told apart with any colour vision; line styles and markers in
# the chapters tell the curves apart in grey as well.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#888888"


def figure(title, xlabel="", ylabel="", size=(7.0, 3.4)):
    """A new figure and its axes. `title` states the finding; labels carry their units."""
    fig, ax = plt.subplots(figsize=size, layout="constrained")
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    return fig, ax


# Told apart by colour, and in grey by line style and marker.
STYLES = [(BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (GREY, ":", "D"),
          ("black", "-", "x"), (BLUE, ":", "v")]


def curves(title, xlabel, ylabel, lines, logx=False, logy=False, size=(7.0, 3.4)):
    """A new figure with one curve a label, and its axes.

    lines: `{label: (x, y)}`, or `{label: (x, low, median, high)}`, whose spread is drawn as bars.
    Curves of up to thirty points get markers. `title` states the finding.

    Raises ValueError for no lines, more than six, or a line of neither form.
    """
    if not 1 <= len(lines) <= len(STYLES):
        raise ValueError(f"curves(lines): {len(lines)} lines; needs 1 to {len(STYLES)}")
    fig, ax = figure(title, xlabel, ylabel, size)
    for (label, line), (color, dashes, marker) in zip(lines.items(), STYLES):
        if len(line) not in (2, 4):
            raise ValueError(f"curves(lines): {label!r} has {len(line)} parts; needs (x, y) or "
                             "(x, low, median, high)")
        x, y = line[0], line[1] if len(line) == 2 else line[2]
        look = {"color": color, "ls": dashes, "label": label, "ms": 5}
        if len(x) <= 30:
            look["marker"] = marker
        if len(line) == 2:
            ax.plot(x, y, **look)
        else:
            below, above = np.subtract(y, line[1]), np.subtract(line[3], y)
            ax.errorbar(x, y, [below, above], capsize=3, **look)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    if len(lines) > 1:
        ax.legend(frameon=False)
    return fig, ax


def bars(title, ylabel, values, size=(7.0, 3.4)):
    """A new figure with a column a label, and its axes.

    values: `{label: number}`, drawn as bars; or `{label: array}`, of which each value is a point
    and the median a line. `title` states the finding. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("bars(values={}): needs at least one label")
    fig, ax = figure(title, ylabel=ylabel, size=size)
    for column, value in enumerate(values.values()):
        color = (BLUE, ORANGE, GREEN, GREY)[column % 4]
        if np.ndim(value) == 0:
            ax.bar(column, value, width=0.6, color=color)
        else:
            places = column + np.linspace(-0.15, 0.15, len(value))
            ax.plot(places, value, "o", color=color, alpha=0.6)
            ax.hlines(np.median(value), column - 0.25, column + 0.25, color=color, lw=3)
    ax.set_xticks(range(len(values)), list(values))
    ax.set_ylim(bottom=0)
    return fig, ax


# How a kind of work looks in a timeline: its colour, the height that tells it apart in grey, and
# the colour of its edge. A white one parts neighbours, its own keeps what is short visible.
KINDS = {
    "compute": (BLUE, 0.8, BLUE),
    "communication": (ORANGE, 0.45, ORANGE),
    "update": (GREEN, 0.62, GREEN),
    "Python": (GREY, 0.25, "white"),
}


def timeline(title, panels, windows=None):
    """A new figure of what ran when, one panel below the other, and the list of its axes.

    panels: `{heading: lanes}`; lanes: `{device: [(start, duration, kind), ...]}`, a row each from
    the top, in ms, with kind one of `KINDS`; windows: `{heading: (first, last)}`, the ms to show
    of a panel, all by default. A short event is still drawn as a hair line.

    Raises ValueError for another kind.
    """
    kinds = [kind for lanes in panels.values() for lane in lanes.values() for *_, kind in lane]
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"timeline: kinds {sorted(unknown)}; it knows {', '.join(KINDS)}")
    rows = sum(len(lanes) for lanes in panels.values())
    fig, axes = plt.subplots(len(panels), squeeze=False, layout="constrained",
                             figsize=(7.0, 0.8 + 0.45 * rows + 0.65 * len(panels)),
                             height_ratios=[len(lanes) + 0.5 for lanes in panels.values()])
    fig.suptitle(title)
    axes = list(axes[:, 0])
    for ax, (heading, lanes) in zip(axes, panels.items(), strict=True):
        for row, lane in enumerate(lanes.values()):
            for kind, (color, height, edge) in KINDS.items():
                spans = [(start, length) for start, length, k in lane if k == kind]
                ax.broken_barh(spans, (row - height / 2, height), fc=color, ec=edge, lw=0.4)
        ax.set_title(heading, fontsize=9, loc="left")
        ax.set_yticks(range(len(lanes)), list(lanes))
        ax.set(ylim=(len(lanes) - 0.4, -0.6), xlim=(windows or {}).get(heading))
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    patches = [plt.Rectangle((0, 0), 1, 1, color=KINDS[kind][0]) for kind in KINDS if kind in kinds]
    fig.legend(patches, [kind for kind in KINDS if kind in kinds], fontsize=8,
               loc="outside lower right", ncols=len(KINDS))
    return fig, axes


def show(fig, alt):
    """Display the figure as PNG with `alt`, a sentence for readers who can't see it.

    It stands in the notebook and is the image's text in the book; JupyterLab 4.6 doesn't show it.
    """
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=110)
    plt.close(fig)
    display(
        {"image/png": png.getvalue(), "text/plain": alt},
        raw=True,
        metadata={"image/png": {"alt": alt}},
    )
