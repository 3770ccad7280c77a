"""The drawings of the map: two ways to cut two matrices, seven ways to cut, two pipelines.

Run it to write three SVG files beside it, the same bytes each time. The pipelines are simulated by
`../map_numbers.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import map_numbers  # noqa: E402
from elements import (  # noqa: E402
    BLUE, FRAME, LIGHT_BLUE, LIGHT_GREY, ORANGE, PALE_GREY, arrow, box, group, line, page, words,
    write,
)

SEQUENCES, DEVICES = 8, 4
SIDE = 66  # of a square in the drawing of seven ways


# ---- Two ways, two matrices, two devices ----


def square(x, y, blue, name, device):
    """A matrix; what the device holds of it, `blue` = (left, top, width, height), is in colour."""
    left, top, width, height = blue
    drawn = [box(x, y, 64, 64, "white", "none"),
             box(x + left, y + top, width, height, BLUE, "none", class_="mine"),
             box(x, y, 64, 64, "none", FRAME)]
    return group(drawn, class_="matrix", data_name=name, data_device=device)


def sequences(x, y, mine, half, device):
    """The numbers of eight sequences, a bar each; `half` of the width: None, 0 or 1."""
    drawn = []
    for number in range(SEQUENCES):
        top = y + 8 * number
        drawn.append(box(x, top, 64, 6, "white", LIGHT_GREY))
        if number in mine:
            left, width = (x, 64) if half is None else (x + 32 * half, 32)
            drawn.append(box(left, top, width, 6, BLUE, "none", class_="mine"))
    return group(drawn, class_="sequences", data_device=device)


def both_ways(x, top, bottom):
    """An exchange between two devices: an arrow with two tips."""
    middle = (top + bottom) / 2
    return arrow(x, middle, x, top, ORANGE, 5) + arrow(x, middle, x, bottom, ORANGE, 5)


def draw_two_ways():
    drawn = []
    columns = {"batch": 90, "first": 196, "middle": 302, "second": 408, "result": 514}
    for panel, way in enumerate(("data", "tensor")):
        top = 8 + 274 * panel
        title = ("data parallelism: half of the sequences, all weights",
                 "tensor parallelism: all sequences, half of the weights")[panel]
        drawn.append(words(320, top + 20, title, 20, bold=True))
        for device in range(2):
            y = top + 36 + 112 * device
            drawn.append(words(6, y + 38, f"device {device + 1}", anchor="start"))
            halves = range(4 * device, 4 * device + 4)
            mine = halves if way == "data" else range(SEQUENCES)
            first = (0, 0, 64, 64) if way == "data" else (32 * device, 0, 32, 64)
            second = (0, 0, 64, 64) if way == "data" else (0, 32 * device, 64, 32)
            between = None if way == "data" else device
            drawn.append(sequences(columns["batch"], y, mine, None, device))
            drawn.append(square(columns["first"], y, first, "first", device))
            drawn.append(sequences(columns["middle"], y, mine, between, device))
            drawn.append(square(columns["second"], y, second, "second", device))
            drawn.append(sequences(columns["result"], y, mine, None, device))
        exchanged = {"first": "backward", "second": "backward"}
        if way == "tensor":
            exchanged = {"batch": "backward", "result": "forward"}
        for name, when in exchanged.items():
            x = columns[name] + 32
            inside = [both_ways(x, top + 102, top + 146),
                      words(x + 14, top + 130, when, anchor="start")]
            drawn.append(group(inside, class_="exchange", data_way=way, data_of=name))
    for name, text in {"batch": "batch", "first": "weights", "middle": "middle",
                       "second": "weights", "result": "result"}.items():
        drawn.append(words(columns[name] + 32, 552, text))
    return page(640, 562, "Data parallelism exchanges gradients of weights, tensor parallelism "
                "activations",
                "Two panels of two devices each. In data parallelism each device has four of eight "
                "sequences and both matrices whole; arrows between the devices are at the "
                "matrices, backward. In tensor parallelism each has all eight "
                "sequences, half of the columns of the first matrix and half of the rows of the "
                "second; arrows are at the results, forward, and at the batch, backward.", drawn)


# ---- Seven ways: what device 1 of four has ----


def parts_of_weights(way):
    """`[(left, top, width, height)]` of the weights, as shares: always there, then at times."""
    quarter = 1 / DEVICES
    everything = [(0, 0, 1, 1)]
    strip = [(0, 0, quarter, 1)]
    if way in ("data", "context"):
        return everything, []
    if way == "sharded data":
        return strip, [(quarter, quarter, 1 - quarter, quarter)]  # the layer in use
    if way == "pipeline":
        return [(0, 0, 1, quarter)], []
    if way == "expert":  # a layer has 4 matrices in attention, and 8 in the MLP of each expert
        attention = 4 / (4 + 8 * DEVICES)
        shared = [(0, layer * quarter, 1, quarter * attention) for layer in range(DEVICES)]
        return [*shared, *strip], []
    return strip, []


def parts_of_batch(way):
    """The same of the batch, whose rows are sequences and whose columns are tokens."""
    quarter = 1 / DEVICES
    if way in ("data", "sharded data", "expert"):
        return [(0, 0, 1, quarter)], []
    if way == "context":
        return [(0, 0, quarter, 1)], []
    if way == "sequence":  # the other tokens only in attention and in the MLP
        return [(0, 0, quarter, 1)], [(quarter, 0, 1 - quarter, 1)]
    return [(0, 0, 1, 1)], []


def cut_square(x, y, parts, of):
    always, at_times = parts
    drawn = [box(x, y, SIDE, SIDE, PALE_GREY, "none")]
    for kind, color, rectangles in (("at-times", LIGHT_BLUE, at_times), ("always", BLUE, always)):
        for left, top, width, height in rectangles:
            drawn.append(box(x + SIDE * left, y + SIDE * top, SIDE * width, SIDE * height, color,
                             "none", class_=kind))
    drawn.append(box(x, y, SIDE, SIDE, "none", FRAME))
    return group(drawn, class_="square", data_of=of)


WAYS = ("data", "sharded data", "tensor", "sequence", "context", "pipeline", "expert")
LIGHT = {"sharded data": "light: layer in use", "sequence": "light: gathered"}


def draw_cuts():
    drawn = []
    for place, way in enumerate(WAYS):
        x = 4 + 160 * (place % 4)
        y = 88 + 164 * (place // 4)
        inside = [words(x + 72, y + 20, way, 20, bold=True),
                  cut_square(x, y + 32, parts_of_weights(way), "weights"),
                  cut_square(x + 78, y + 32, parts_of_batch(way), "batch"),
                  words(x + 33, y + 118, "weights"), words(x + 111, y + 118, "batch")]
        if way in LIGHT:
            inside.append(words(x + 72, y + 142, LIGHT[way], 17))
        drawn.append(group(inside, class_="way", data_way=way))
    legend = {4: (BLUE, "device 1 of 4"), 174: (LIGHT_BLUE, "device 1, at times"),
              422: (PALE_GREY, "other devices")}
    for x, (color, text) in legend.items():
        drawn += [box(x, 8, 22, 18, color, FRAME), words(x + 30, 23, text, anchor="start")]
    drawn += [words(4, 52, "weights: layers downwards, a layer's width to the right",
                    anchor="start"),
              words(4, 76, "batch: sequences downwards, their tokens to the right",
                    anchor="start")]
    lines = ["stripes: attention,", "on every device;", "column: its experts"]
    for line_number, text in enumerate(lines):
        drawn.append(words(478, 300 + 22 * line_number, text, anchor="start"))
    return page(640, 386, "Each way cuts the weights, the batch, or both",
                "Seven pairs of squares, weights and batch, with device 1's part of four in blue. "
                "Data: all weights, a quarter of the sequences. Sharded data: a quarter of each "
                "layer's weights, one layer whole while in use, a quarter of the sequences. "
                "Context: all weights, a quarter of the tokens. Pipeline: one layer of four, the "
                "whole batch. Tensor: a quarter of each layer's width, the whole batch. Sequence: "
                "the same, and a quarter of the tokens, the others while in use. Expert: the "
                "shared part and a quarter of the rest, a quarter of the sequences.", drawn)


# ---- Pipelines ----


def draw_pipeline(stages=4, micro=8):
    drawn = []
    texts = {"GPipe": "all forward, then all backward", "1F1B": "backward as soon as it can"}
    for panel, schedule in enumerate(("GPipe", "1F1B")):
        events = map_numbers.simulate(schedule, stages, micro)
        last = max(end for *_, end in events)
        unit = 562 / last
        top = 8 + 176 * panel
        most = max(map_numbers.kept(events))
        drawn.append(words(4, top + 20, f"{schedule}: {texts[schedule]}", 20, bold=True,
                           anchor="start"))
        drawn.append(words(634, top + 20, f"keeps {most} micro-batches", 20, anchor="end"))
        inside = [box(72, top + 32, 562, 128, PALE_GREY, "none")]
        for stage in range(stages):
            inside.append(words(4, top + 55 + 32 * stage, f"stage {stage + 1}", anchor="start"))
        for stage, kind, number, start, end in events:
            color, ink = (BLUE, "white") if kind == "F" else (ORANGE, "black")
            x = 72 + unit * start
            y = top + 34 + 32 * stage
            inside.append(box(x, y, unit * (end - start), 28, color, "white", class_="pass",
                              data_stage=stage, data_kind=kind, data_number=number))
            inside.append(words(x + unit * (end - start) / 2, y + 20, str(number + 1), fill=ink))
        drawn.append(group(inside, class_="schedule", data_name=schedule))
    for time in range(0, last + 1, 3):
        x = 72 + unit * time
        drawn.append(line(x, 344, x, 352, FRAME, 1))
        drawn.append(words(min(x, 628), 370, str(time), class_="time"))
    drawn.append(words(4, 370, "time", anchor="start"))
    share = map_numbers.bubble(stages, micro)
    drawn.append(words(72, 400, f"blue: forward, orange: backward, grey: idle, {100 * share:.0f} % "
                       "in both", anchor="start"))
    return page(640, 412, "Both pipelines idle for as long; 1F1B keeps fewer micro-batches",
                "Two timelines of four stages and eight micro-batches. Both end after 33 units of "
                "time. GPipe runs all forward passes, then all backward passes, and keeps eight "
                "micro-batches; 1F1B alternates and keeps at most four.", drawn)


DRAWINGS = {"two_ways": draw_two_ways, "cuts": draw_cuts, "pipeline": draw_pipeline}

if __name__ == "__main__":
    write(DRAWINGS)
