"""One look for the course's figures: size, palette and alternative text."""

import io

import matplotlib.pyplot as plt
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


def show(fig, alt):
    """Display the figure as PNG with `alt`, a sentence for readers who can't see it."""
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=110)
    plt.close(fig)
    display(
        {"image/png": png.getvalue(), "text/plain": alt},
        raw=True,
        metadata={"image/png": {"alt": alt}},
    )
