"""The drawings of chapter 10.

Run it to write two SVG files beside it, the same bytes each time.
"""

from typing import NamedTuple

from elements import BLUE, GREEN, GREY, ORANGE, arrow, box, group, line, page, words, write

LEFT = 92  # where time begins
IDLE = {"Python", "waiting"}
COLORS = {"compute": BLUE, "communication": ORANGE, "update": GREEN}


class Span(NamedTuple):
    """One part of a lane."""

    begin: int
    end: int
    part: str


STEP = {
    "cpu(0)": [Span(92, 166, "Python"), Span(166, 330, "compute"), Span(330, 412, "waiting"),
               Span(412, 546, "communication"), Span(546, 624, "update")],
    "cpu(1)": [Span(92, 206, "Python"), Span(206, 412, "compute"),
               Span(412, 546, "communication"), Span(546, 624, "waiting")],
}


def draw_lane_parts():
    """A step on two devices: each lane's five parts."""
    drawn = [words(320, 32, "At each moment a device does one of five things", 22, bold=True)]
    drawn.append(words(16, 82, "Python", anchor="start"))
    drawn.append(box(LEFT, 60, 158, 34, GREY, "none"))
    drawn.append(words(LEFT + 79, 83, "hands out", fill="white", bold=True))
    for number, (lane, spans) in enumerate(STEP.items()):
        top = 114 + 74 * number
        parts = [words(16, top + 34, lane, anchor="start")]
        for span in spans:
            middle = (span.begin + span.end) / 2
            width = span.end - span.begin
            look = {"class_": "part", "data_part": span.part}
            if span.part in IDLE:
                parts.append(group([
                    box(span.begin + 2, top + 2, width - 4, 52, "white", GREY, stroke_width=2,
                        stroke_dasharray="5 4"),
                    words(middle, top + 34, span.part),
                ], **look))
            else:
                color = "black" if span.part == "communication" else "white"
                parts.append(group([
                    box(span.begin, top, width, 56, COLORS[span.part], "white", stroke_width=2),
                    words(middle, top + 34, span.part, 17, fill=color, bold=True),
                ], **look))
        drawn.append(group(parts, class_="lane", data_lane=lane))
    drawn.append(arrow(LEFT, 262, 624, 262, "black", 2))
    drawn.append(words(600, 288, "time", anchor="middle"))
    drawn.append(words(LEFT, 288, "dashed: idle", anchor="start"))
    return page(640, 302, "A step in two lanes, each with five parts", (
        "Above, Python hands out work for a while. Below, the lane of cpu(0): idle because of "
        "Python, compute, waiting, communication, update. The lane of cpu(1): idle because of "
        "Python, a longer compute, communication, waiting while the other updates."), drawn)


PASS = {3: 60, 2: 80, 1: 100}  # how long each layer's backward pass takes, in the order of time
MESSAGE = {3: 120, 2: 50, 1: 30}  # and its gradient's message
START = 116


def schedule(overlap):
    """`{layer: Span}` of the backward pass and of the link."""
    backward = {}
    now = START
    for layer, width in PASS.items():
        backward[layer] = Span(now, now + width, f"{layer}")
        now += width
    link = {}
    free = now if not overlap else START
    for layer, width in MESSAGE.items():
        begin = max(free, backward[layer].end)
        link[layer] = Span(begin, begin + width, f"{layer}")
        free = begin + width
    return backward, link


def draw_overlap():
    """Three layers' gradients over a link: after the backward pass, and during it."""
    drawn = [words(320, 32, "Send each gradient as soon as it is ready", 22, bold=True)]
    last = {}
    for number, (title, overlap) in enumerate([("held", False),
                                               ("at once", True)]):
        top = 58 + 142 * number
        backward, link = schedule(overlap)
        last[overlap] = max(span.end for span in link.values())
        parts = [words(START, top + 14, title, anchor="start", bold=True)]
        for row, (name, spans, color, ink) in enumerate([("backward", backward, BLUE, "white"),
                                                         ("link", link, ORANGE, "black")]):
            y = top + 26 + 50 * row
            parts.append(words(16, y + 27, name, anchor="start"))
            for layer, span in spans.items():
                width = span.end - span.begin
                parts.append(group([
                    box(span.begin, y, width, 40, color, "white", stroke_width=3),
                    words(span.begin + width / 2, y + 27, span.part, fill=ink, bold=True),
                ], class_="span", data_row=name, data_layer=layer))
        drawn.append(group(parts, class_="panel", data_overlap=int(overlap)))
    drawn.append(line(last[False], 84, last[False], 322, "black", 2, stroke_dasharray="6 4"))
    drawn.append(arrow(last[False] - 2, 296, last[True] + 4, 296, GREEN, 4))
    drawn.append(words((last[True] + last[False]) / 2, 284, "saved", bold=True))
    drawn.append(words(START, 350, "3, 2, 1: the layers; the last one's gradient is ready first",
                       anchor="start"))
    return page(640, 366, "Gradients sent after the backward pass, and during it", (
        "Two panels with a row for the backward pass and one for the link. Held: "
        "the link carries the gradients of the layers 3, 2 and 1 after the whole backward pass. "
        "At once: it carries layer 3's while the pass works on layer 2, and ends earlier."),
        drawn)


DRAWINGS = {"lane_parts": draw_lane_parts, "overlap": draw_overlap}

if __name__ == "__main__":
    write(DRAWINGS)
