"""The course's figures: what `curves`, `bars` and `timeline` draw, and where."""

import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers.plotting import KINDS, STYLES, bars as draw_bars, curves, timeline
from matplotlib.colors import to_hex, to_rgb

LANES = {
    "cpu/0": [(0, 10, "compute"), (10, 2, "communication")],
    "cpu/1": [(1, 5, "compute"), (8, 1, "compute"), (12, 0.5, "communication")],
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def bars(ax):
    """What is drawn: `(left, right, middle of the row, colour)` of each bar, in ms."""
    found = set()
    for collection in ax.collections:
        color = collection.get_facecolor()
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.add((left, right, round((low + high) / 2, 6), to_hex(color[0])))
    return found


def expected(lanes):
    return {(start, start + length, row, to_hex(KINDS[kind][0]))
            for row, lane in enumerate(lanes.values()) for start, length, kind in lane}


def test_every_event_is_drawn_in_its_lane_at_its_time_in_its_colour():
    _, (ax,) = timeline("what ran when", {"a step": LANES})
    assert bars(ax) == expected(LANES)


def test_lanes_are_named_and_the_first_is_on_top():
    fig, (ax,) = timeline("what ran when", {"a step": LANES})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cpu/0", "cpu/1"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert ax.get_xlabel() == "ms"
    assert fig._suptitle.get_text() == "what ran when" and ax.get_title("left") == "a step"


def test_a_panel_shows_its_window_and_the_others_everything():
    panels = {"all": LANES, "the end": LANES}
    _, (whole, end) = timeline("what ran when", panels, {"the end": (9, 13)})
    assert end.get_xlim() == (9, 13)
    assert whole.get_xlim()[0] <= 0 and whole.get_xlim()[1] >= 12.5
    assert bars(whole) == bars(end) == expected(LANES)


def test_the_legend_has_the_kinds_that_there_are():
    fig, _ = timeline("what ran when", {"a step": LANES})
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["compute", "communication"]
    lanes = {"Python": [(0, 1, "Python")]}
    fig, _ = timeline("what ran when", {"a step": lanes})
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["Python"]


def test_a_lane_without_events_is_still_a_lane():
    _, (ax,) = timeline("what ran when", {"a step": {"cpu/0": [(0, 1, "compute")], "cpu/1": []}})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cpu/0", "cpu/1"]


def test_kinds_are_told_apart_in_grey():
    greys = [sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(color), strict=True))
             for color, *_ in KINDS.values()]
    heights = [height for _, height, _ in KINDS.values()]
    assert len(set(heights)) == len(heights)
    assert abs(greys[0] - greys[1]) > 0.2, "compute and communication by their grey as well"


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'sleep'.*compute, communication"):
        timeline("what ran when", {"a step": {"cpu/0": [(0, 1, "sleep")]}})


def test_plotting_needs_no_mxnet():
    code = "import sys, helpers.plotting; assert 'mxnet' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- curves and bars ----


def test_curves_draws_each_line_with_its_label_and_look():
    lines = {"one": ([1, 2, 3], [4, 5, 6]), "two": (range(40), np.arange(40))}
    _, ax = curves("they rise", "x", "y", lines, logy=True)
    one, two = ax.get_lines()
    assert one.get_xydata().tolist() == [[1, 4], [2, 5], [3, 6]]
    assert two.get_ydata().tolist() == list(range(40))
    assert [line.get_label() for line in (one, two)] == ["one", "two"]
    assert one.get_marker() == "o" and two.get_marker() == "None", "markers for few points only"
    assert one.get_linestyle() != two.get_linestyle() and one.get_color() != two.get_color()
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("they rise", "x", "y")
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "log")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "two"]


def test_a_spread_is_drawn_from_low_to_high():
    _, ax = curves("", "", "", {"a": ([1, 2], [3, 4], [5, 6], [9, 7])})
    (container,) = ax.containers
    assert container.lines[0].get_ydata().tolist() == [5, 6]
    ends = [segment[:, 1].tolist() for segment in container.lines[2][0].get_segments()]
    assert ends == [[3, 9], [4, 7]]


def test_all_looks_differ_in_grey_too():
    assert len({(dashes, marker) for _, dashes, marker in STYLES}) == len(STYLES)


@pytest.mark.parametrize(("lines", "message"), [
    ({}, "0 lines; needs 1 to 6"),
    ({str(n): ([1], [1]) for n in range(7)}, "7 lines"),
    ({"a": ([1], [1], [1])}, "'a' has 3 parts"),
])
def test_lines_that_can_not_be_drawn(lines, message):
    with pytest.raises(ValueError, match=message):
        curves("", "", "", lines)


def test_bars_draws_a_bar_or_points_with_their_median():
    _, ax = draw_bars("b is higher", "ms", {"a": 3.0, "b": np.array([4.0, 8.0, 5.0])})
    (bar,) = ax.patches
    assert (bar.get_x() + bar.get_width() / 2, bar.get_height()) == (0, 3)
    (points,) = ax.get_lines()
    assert points.get_ydata().tolist() == [4, 8, 5]
    assert np.allclose(points.get_xdata(), 1, atol=0.2)
    (middle,) = ax.collections
    assert middle.get_segments()[0][:, 1].tolist() == [5, 5]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]
    assert ax.get_ylim()[0] == 0 and ax.get_title() == "b is higher" and ax.get_ylabel() == "ms"
    with pytest.raises(ValueError, match="at least one"):
        draw_bars("", "", {})
