"""The drawings of chapter 01 and of its deeper notebook.

Run it to write three SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, arrow, box,
    group, line, page, words, write,
)

X = (1, 2, 3, 4)  # the examples of the one-weight model: y is 3 x
LR = 0.01
LAYERS = ("conv 1", "conv 2", "dense 1", "dense 2")
EXAMPLES = 8


def gradient(examples):
    """Of the sum of (w x - y)² at w = 0."""
    return sum(-2 * x * 3 * x for x in examples)


def minus(number):
    """A number with a true minus sign."""
    return str(number).replace("-", "−")


def draw_one_weight():
    """Chapter 01: a step of the model with one weight on two devices."""
    drawn = [words(320, 32, "Each device finds its part; both get the sum", 22, bold=True)]
    looks = ((150, BLUE, PALE_BLUE, X[:2]), (490, ORANGE, PALE_ORANGE, X[2:]))
    total = gradient(X)
    for rank, (middle, color, pale, examples) in enumerate(looks):
        values = " and ".join(map(str, examples))
        drawn.append(group([
            box(middle - 130, 56, 260, 136, pale, color, stroke_width=3, rx=8),
            words(middle, 84, f"device {rank}", 20, bold=True),
            words(middle, 114, f"x: {values}"),
            words(middle, 142, "its own copy of w: 0"),
            words(middle, 174, f"gradient {minus(gradient(examples))}", 20, bold=True),
        ], class_="device", data_gradient=gradient(examples)))
        drawn.append(arrow(middle, 196, 320 + (middle - 320) * 0.42, 246, color, 4))
        drawn.append(arrow(320 + (middle - 320) * 0.42, 292, middle, 340, GREEN, 4))
        drawn.append(box(middle - 130, 344, 260, 52, pale, color, stroke_width=3, rx=8))
        drawn.append(words(middle, 377, f"w: {-LR * total:.1f}", 20, bold=True))
    drawn.append(box(210, 248, 220, 44, PALE_GREEN, GREEN, stroke_width=3, rx=8))
    drawn.append(words(320, 277, f"sum {minus(total)}", 20, bold=True, class_="sum"))
    return page(640, 412, "One step of data-parallel training on two devices",
                "Device 0 has the examples 1 and 2, device 1 has 3 and 4, and each has a copy of "
                "the weight, 0. Their gradients are −30 and −150. Arrows lead from both to the "
                "sum, −180, and from there back to both devices, where the weight becomes 1.8.",
                drawn)


CALLS = (("p1", 0), ("p2", 1), ("p3", 0), ("p4", 1))  # each product, and its device


def draw_work(x, y, name, rank):
    """A piece of work, in the colour of its device."""
    color, pale = ((BLUE, PALE_BLUE), (ORANGE, PALE_ORANGE))[rank]
    return group([box(x, y, 54, 36, pale, color, stroke_width=3, rx=6),
                  words(x + 27, y + 25, name, 18, bold=True)],
                 class_="work", data_name=name, data_device=rank)


def draw_moment(top, heading, called):
    """One panel: where Python is, and what is in the queues; nothing has been finished yet."""
    drawn = [words(16, top, heading, 18, "start", bold=True)]
    for number, (name, rank) in enumerate(CALLS):
        y = top + 34 + 28 * number
        ink = GREY if number < called else "black"
        drawn.append(words(46, y, f"{name} = dot on cpu({rank})", 17, "start", fill=ink))
    drawn.append(words(46, top + 34 + 28 * len(CALLS), "the next line", 17, "start"))
    at = top + 28 + 28 * called
    drawn.append(arrow(10, at, 38, at, "black", 4))
    for rank in (0, 1):
        y = top + 22 + 68 * rank
        color = (BLUE, ORANGE)[rank]
        drawn.append(box(276, y - 8, 202, 52, PALE_GREY, FRAME))
        drawn.append(box(524, y - 8, 106, 52, "white", color, stroke_width=3, rx=8))
        drawn.append(arrow(480, y + 18, 520, y + 18, "black", 3))
        mine = [name for name, device in CALLS[:called] if device == rank]
        if mine:
            drawn.append(draw_work(550, y, mine[0], rank))
        for place, name in enumerate(mine[1:]):
            drawn.append(draw_work(414 - 60 * place, y, name, rank))
    return group(drawn, class_="moment", data_called=called)


def draw_two_queues():
    """Chapter 01: the queues fill while Python goes on."""
    drawn = [words(320, 32, "Python goes on while the devices work", 22, bold=True)]
    drawn.append(words(120, 68, "Python"))
    drawn.append(words(377, 68, "queues"))
    drawn.append(words(577, 68, "devices"))
    drawn.append(draw_moment(100, "after two calls", 2))
    drawn.append(line(16, 264, 624, 264, GREY, 1))
    drawn.append(draw_moment(296, "after four calls", 4))
    return page(640, 462, "Two queues fill while Python goes on",
                "Two moments. After two calls, Python is at the third line; product p1 runs on "
                "the first device and p2 on the second, and both queues are empty. After four "
                "calls Python is already at the next line; p1 and p2 still run, p3 waits in the "
                "first device's queue and p4 in the second's.", drawn)


def draw_grid(left, name, below):
    """Layers down, examples across, each part in the colour of the device that works on it."""
    size, high, top = 17, 40, 104
    drawn = [words(left + 68, top - 14, name, 18, bold=True)]
    for layer in range(len(LAYERS)):
        for example in range(EXAMPLES):
            x, y = left + size * example, top + (high + 8) * layer
            if name == "by layer":
                parts = [(y, high, int(layer > 0))]
            elif name == "by data":
                parts = [(y, high, int(example >= EXAMPLES // 2))]
            else:
                parts = [(y, high / 2, 0), (y + high / 2, high / 2, 1)]
            for at, height, rank in parts:
                drawn.append(box(x, at, size, height, (BLUE, ORANGE)[rank], "white",
                                 class_="part", data_layer=layer, data_example=example,
                                 data_device=rank))
    drawn.append(words(left + 68, top + 4 * (high + 8) + 18, "8 examples", 17))
    drawn.append(words(left + 68, top + 4 * (high + 8) + 48, below[0], 17, bold=True))
    drawn.append(words(left + 68, top + 4 * (high + 8) + 70, below[1], 17, bold=True))
    return group(drawn, class_="cut", data_name=name)


def draw_three_cuts():
    """Deeper: three ways to divide a network."""
    drawn = [words(320, 32, "Three ways to divide the same work", 22, bold=True)]
    for row, layer in enumerate(LAYERS):
        drawn.append(words(86, 104 + 48 * row + 26, layer, 17, "end"))
    panels = ((104, "by layer", ("activations cross", "at the cut")),
              (290, "inside layers", ("activations cross", "at each layer")),
              (476, "by data", ("gradients", "are summed")))
    for left, name, below in panels:
        drawn.append(draw_grid(left, name, below))
    for rank, color in enumerate((BLUE, ORANGE)):
        x = 210 + 150 * rank
        drawn.append(box(x, 396, 24, 24, color, "none"))
        drawn.append(words(x + 34, 415, f"device {rank}", 17, "start"))
    return page(640, 436, "Three ways to divide a network's work between two devices",
                "Three grids of four layers by eight examples, in the colours of two devices. By "
                "layer: the first row is device 0's, the other three are device 1's. Inside "
                "layers: the upper half of each row is device 0's, the lower half device 1's. By "
                "data: the first four columns are device 0's, the last four device 1's.", drawn)


DRAWINGS = {"one_weight": draw_one_weight, "two_queues": draw_two_queues,
            "three_cuts": draw_three_cuts}

if __name__ == "__main__":
    write(DRAWINGS)
