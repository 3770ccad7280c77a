"""The drawings of chapter 10.

Run it to write two SVG files beside it, the same bytes each time.
"""

from typing import NamedTuple

from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, arrow, box, group, line, page, words, write,
)

LEFT = 92  # where time begins
COLORS = {"compute": BLUE, "communicate": ORANGE, "update": GREEN}


class Span(NamedTuple):
    """One part of a row."""

    begin: int
    end: int
    part: str


STEP = {
    "cpu(0)": [Span(92, 330, "compute"), Span(330, 412, "idle"),
               Span(412, 546, "communicate"), Span(546, 624, "update")],
    "cpu(1)": [Span(92, 166, "idle"), Span(166, 412, "compute"),
               Span(412, 546, "communicate"), Span(546, 624, "idle")],
}


def draw_lane_parts():
    """A step on two devices: what each does at each moment."""
    drawn = [words(320, 32, "In a training step, devices don't only compute", 22, bold=True)]
    for number, (lane, spans) in enumerate(STEP.items()):
        top = 58 + 74 * number
        parts = [words(16, top + 34, lane, anchor="start")]
        for span in spans:
            middle = (span.begin + span.end) / 2
            width = span.end - span.begin
            look = {"class_": "part", "data_part": span.part}
            if span.part == "idle":
                parts.append(group([
                    box(span.begin + 2, top + 2, width - 4, 52, "white", GREY, stroke_width=2,
                        stroke_dasharray="5 4"),
                    words(middle, top + 34, span.part),
                ], **look))
            else:
                color = "black" if span.part == "communicate" else "white"
                parts.append(group([
                    box(span.begin, top, width, 56, COLORS[span.part], "white", stroke_width=2),
                    words(middle, top + 34, span.part, fill=color, bold=True),
                ], **look))
        drawn.append(group(parts, class_="lane", data_lane=lane))
    drawn.append(arrow(LEFT, 206, 624, 206, "black", 2))
    drawn.append(words(600, 232, "time", anchor="middle"))
    return page(640, 244, "A step on two devices, from left to right", (
        "cpu(0) computes, is idle until cpu(1) has computed too, communicates and updates. cpu(1) "
        "begins later, computes longer, communicates, and is idle while the other updates."), drawn)


PASS = {3: 80, 2: 84, 1: 100}  # how long each layer's backward pass takes, in the order of time
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
    for number, (title, overlap) in enumerate([("sent at the end", False), ("sent at once", True)]):
        top = 58 + 172 * number
        backward, link = schedule(overlap)
        computed = backward[1].end
        arrived = max(span.end for span in link.values())
        parts = [words(START, top + 14, title, anchor="start", bold=True)]
        for row, (name, spans, color, ink) in enumerate([("backward", backward, BLUE, "white"),
                                                         ("link", link, ORANGE, "black")]):
            noun = {"backward": "layer ", "link": "gradient "}[name]
            y = top + 26 + 50 * row
            parts.append(words(16, y + 27, name, anchor="start"))
            for layer, span in spans.items():
                width = span.end - span.begin
                parts.append(group([
                    box(span.begin, y, width, 40, color, "white", stroke_width=3),
                    words(span.begin + width / 2, y + 27, (noun if width >= 80 else "") + span.part,
                          fill=ink, bold=True),
                ], class_="span", data_row=name, data_layer=layer))
        y = top + 122
        parts.append(line(computed + 2, y, arrived - 2, y, FRAME, 3))
        for end in (computed + 2, arrived - 2):
            parts.append(line(end, y - 6, end, y + 6, FRAME, 3))
        parts.append(words((computed + arrived) / 2, y + 22, "exposed: only the link works"))
        drawn.append(group(parts, class_="panel", data_overlap=int(overlap)))
    return page(640, 390, "Gradients sent after the backward pass, and during it", (
        "Two panels with a row for the backward pass and one for the link. At the end: the link "
        "carries the gradients of the layers 3, 2 and 1 after the whole backward pass. At once: it "
        "begins with layer 3's while the pass works on layer 2. The time in which only the link "
        "works is marked as exposed."), drawn)


DRAWINGS = {"lane_parts": draw_lane_parts, "overlap": draw_overlap}

if __name__ == "__main__":
    write(DRAWINGS)
