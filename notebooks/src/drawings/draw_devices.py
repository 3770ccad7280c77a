"""The drawings of chapter 01.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, arrow, box,
    group, line, page, words, write,
)

X = (1, 2, 3, 4)  # the examples of the one-weight model: y is 3 x
LR = 0.01


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


CALLS = (("fwd", 0), ("bwd", 0), ("fwd", 1), ("bwd", 1))  # each piece of work, and its device
SAID = {"fwd": "forward", "bwd": "backward"}


def draw_work(x, y, name, rank):
    """A piece of work, in the colour of its device."""
    color, pale = ((BLUE, PALE_BLUE), (ORANGE, PALE_ORANGE))[rank]
    return group([box(x, y, 62, 36, pale, color, stroke_width=3, rx=6),
                  words(x + 31, y + 24, name, 18, bold=True)],
                 class_="work", data_name=name, data_device=rank)


def draw_moment(top, heading, called):
    """One panel: where Python is, and what is in the queues; nothing has been finished yet."""
    drawn = [words(16, top, heading, 18, "start", bold=True)]
    for number, (name, rank) in enumerate(CALLS):
        y = top + 34 + 28 * number
        ink = FRAME if number < called else "black"
        drawn.append(words(92, y, f"{SAID[name]} on device {rank}", 17, "start", fill=ink,
                           bold=number == called))
    drawn.append(words(92, top + 34 + 28 * len(CALLS), "the next line", 17, "start",
                       bold=called == len(CALLS)))
    at = top + 34 + 28 * called
    drawn.append(words(16, at, "now:", 17, "start", bold=True))
    drawn.append(arrow(58, at - 6, 86, at - 6, "black", 4))
    for rank in (0, 1):
        y = top + 22 + 68 * rank
        color = (BLUE, ORANGE)[rank]
        drawn.append(box(276, y - 8, 202, 52, PALE_GREY, FRAME))
        drawn.append(box(524, y - 8, 106, 52, "white", color, stroke_width=3, rx=8))
        drawn.append(arrow(480, y + 18, 520, y + 18, "black", 3))
        mine = [name for name, device in CALLS[:called] if device == rank]
        if mine:
            drawn.append(draw_work(546, y, mine[0], rank))
        else:
            drawn.append(words(577, y + 24, "idle", 17, fill=FRAME))
        for place, name in enumerate(mine[1:]):
            drawn.append(draw_work(406 - 68 * place, y, name, rank))
    return group(drawn, class_="moment", data_called=called)


def draw_two_queues():
    """Chapter 01: the queues fill while Python goes on."""
    drawn = [words(320, 32, "Python fills the queues, and doesn't wait", 22, bold=True)]
    drawn.append(words(92, 68, "Python calls", anchor="start"))
    drawn.append(words(377, 68, "queues"))
    drawn.append(words(577, 68, "devices"))
    drawn.append(draw_moment(100, "after two calls", 2))
    drawn.append(line(16, 264, 624, 264, GREY, 1))
    drawn.append(draw_moment(296, "after four calls", 4))
    return page(640, 462, "Python fills the queues, and doesn't wait",
                "Two moments. After two calls device 0 runs its forward pass, its backward pass "
                "waits in its queue, and device 1 is idle. After four calls Python is already at "
                "the next line; both devices run their forward passes, and their backward passes "
                "wait in the queues.", drawn)


DRAWINGS = {"one_weight": draw_one_weight, "two_queues": draw_two_queues}

if __name__ == "__main__":
    write(DRAWINGS)
