"""The drawings of chapter 10: they tell the truth."""

import draw_overlap
from helpers.plotting import KINDS
from svg import SVG, read, with_class


def place(element):
    """Left and right edge of its rectangle."""
    rect = element.find(SVG + "rect")
    left = float(rect.get("x"))
    return left, left + float(rect.get("width"))


def test_a_lane_has_its_parts_one_after_the_other_in_the_colours_of_the_timelines():
    lanes = with_class(read("lane_parts"), "lane")
    seen = set()
    for lane in lanes:
        parts = with_class(lane, "part")
        edges = [place(part) for part in parts]
        for (_, end), (begin, _) in zip(edges, edges[1:]):
            assert 0 <= begin - end <= 4
        for part in parts:
            kind = part.get("data-part")
            assert kind in "".join(part.itertext())
            seen.add(kind)
            if kind in draw_overlap.COLORS:
                assert part.find(SVG + "rect").get("fill") == KINDS[kind][0]
    assert seen == {"compute", "communication", "update", "Python", "waiting"}
    first, second = ({part.get("data-part"): place(part) for part in with_class(lane, "part")}
                     for lane in lanes)
    assert first["communication"] == second["communication"], "both exchange at the same time"
    assert first["communication"][0] >= second["compute"][1], "the first waits for the second"


def test_a_message_leaves_after_its_gradient_and_one_at_a_time():
    ends = {}
    for panel in with_class(read("overlap"), "panel"):
        rows = {"backward": {}, "link": {}}
        for span in with_class(panel, "span"):
            rows[span.get("data-row")][int(span.get("data-layer"))] = place(span)
        for row in rows.values():
            assert list(row) == [3, 2, 1]
            edges = list(row.values())
            assert all(end <= begin for (_, end), (begin, _) in zip(edges, edges[1:]))
        for layer, (begin, _) in rows["link"].items():
            assert begin >= rows["backward"][layer][1]
        overlap = rows["link"][3][0] < rows["backward"][1][1]
        assert overlap == (panel.get("data-overlap") == "1")
        ends[overlap] = rows["link"][1][1]
    assert ends[True] < ends[False], "saved"
