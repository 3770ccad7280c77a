"""The course's figures: what `curves`, `bars` and `timeline` draw, and where."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import plotting
from helpers.plotting import KINDS, STYLES, bars, curves, timeline
from matplotlib.colors import to_hex, to_rgb

LANES = {
    "cpu/0": [(0, 10, "compute"), (10, 2, "communication")],
    "cpu/1": [(1, 5, "compute"), (8, 1, "compute"), (12, 0.5, "communication")],
    "cpu/2": [],
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def drawn(ax):
    """`(left, right, middle of the row, colour)` of each bar of a timeline, in ms."""
    found = set()
    for collection in ax.collections:
        color = collection.get_facecolor()
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.add((left, right, round((low + high) / 2, 6), to_hex(color[0])))
    return found


def test_every_event_is_drawn_in_its_lane_at_its_time_in_its_colour():
    panels = {"a step": LANES, "the end": LANES}
    fig, (whole, end) = timeline("what ran when", panels, {"the end": (9, 13)})
    expected = {(start, start + length, row, to_hex(KINDS[kind][0]))
                for row, lane in enumerate(LANES.values()) for start, length, kind in lane}
    assert drawn(whole) == drawn(end) == expected
    assert end.get_xlim() == (9, 13) and whole.get_xlim()[1] >= 12.5
    assert [label.get_text() for label in whole.get_yticklabels()] == list(LANES)
    assert whole.get_ylim()[0] > whole.get_ylim()[1], "the first is on top"
    assert (fig._suptitle.get_text(), whole.get_title("left")) == ("what ran when", "a step")
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["compute", "communication"]
    with pytest.raises(ValueError, match="'sleep'.*compute, communication"):
        timeline("what ran when", {"a step": {"cpu/0": [(0, 1, "sleep")]}})


def test_looks_are_told_apart_in_grey():
    assert len({(dashes, marker) for _, dashes, marker in STYLES}) == len(STYLES)
    assert len({height for _, height, _ in KINDS.values()}) == len(KINDS)
    compute, communication = (np.dot((0.299, 0.587, 0.114), to_rgb(KINDS[kind][0]))
                              for kind in ("compute", "communication"))
    assert abs(compute - communication) > 0.2


def test_curves_draws_each_line_with_its_label_and_look():
    lines = {"one": ([1, 2, 3], [4, 5, 6]), "two": (range(40), np.arange(40))}
    _, ax = curves("they rise", "x", "y", lines, logy=True)
    one, two = ax.get_lines()
    assert one.get_xydata().tolist() == [[1, 4], [2, 5], [3, 6]]
    assert two.get_ydata().tolist() == list(range(40))
    assert one.get_marker() == "o" and two.get_marker() == "None", "markers for few points only"
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("they rise", "x", "y")
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "log")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "two"]


def test_a_spread_is_drawn_from_low_to_high():
    _, ax = curves("", "", "", {"a": ([1, 2], [3, 4], [5, 6], [9, 7])}, logx=True)
    (container,) = ax.containers
    assert container.lines[0].get_ydata().tolist() == [5, 6]
    ends = [segment[:, 1].tolist() for segment in container.lines[2][0].get_segments()]
    assert ends == [[3, 9], [4, 7]] and ax.get_xscale() == "log"


def test_bars_draws_a_bar_or_points_with_their_median():
    _, ax = bars("b is higher", "ms", {"a": 3.0, "b": np.array([4.0, 8.0, 5.0])})
    (bar,) = ax.patches
    assert (bar.get_x() + bar.get_width() / 2, bar.get_height()) == (0, 3)
    (points,) = ax.get_lines()
    assert points.get_ydata().tolist() == [4, 8, 5]
    assert np.allclose(points.get_xdata(), 1, atol=0.2)
    (middle,) = ax.collections
    assert middle.get_segments()[0][:, 1].tolist() == [5, 5]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]
    assert ax.get_ylim()[0] == 0


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: curves("", "", "", {}), "0 lines; needs 1 to 6"),
    (lambda: curves("", "", "", {str(n): ([1], [1]) for n in range(7)}), "7 lines"),
    (lambda: curves("", "", "", {"a": ([1], [1], [1])}), "'a' has 3 parts"),
    (lambda: bars("", "", {}), "at least one")])
def test_what_can_not_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_a_figure_is_shown_as_png_with_its_sentence_and_closed(monkeypatch):
    shown = []
    monkeypatch.setattr(plotting, "display", lambda data, raw, metadata: shown.append(
        (data, metadata)))
    fig, _ = plotting.figure("a title")
    plotting.show(fig, "a sentence")
    ((data, metadata),) = shown
    assert data["image/png"].startswith(b"\x89PNG") and data["text/plain"] == "a sentence"
    assert metadata == {"image/png": {"alt": "a sentence"}} and plt.get_fignums() == []
