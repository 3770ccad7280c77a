"""The drawings of chapter 13: one step in Gluon and in PyTorch; a weight in DataParallel.

Run it to write the two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow, box, group, line, page, words,
    write,
)

FILLS = {"value": (PALE_GREY, "black"), "works": (PALE_GREY, "black"),
         "divides": (PALE_ORANGE, ORANGE)}
GLUON = [  # what is there or happens, from top to bottom, and which kind it is
    ("w = 0", "value"),
    ("losses 9, 36, 81, 144", "value"),
    ("", ""),
    ("gradient −180", "value"),
    ("step(4): ÷ 4, × 0.04", "divides"),
    ("w = 1.8", "value"),
]
PYTORCH = [
    ("w = 0", "value"),
    ("losses 9, 36, 81, 144", "value"),
    ("mean: ÷ 4, so 67.5", "divides"),
    ("gradient −45", "value"),
    ("step(): × 0.04", "works"),
    ("w = 1.8", "value"),
]
GRADIENTS = [1, 10, 100]  # of three copies of a weight, one on each GPU


def draw_one_step_twice():
    """Two columns from a weight to the next one, with the division by 4 where each has it."""
    title = "Both divide by 4: Gluon in step, PyTorch in the loss"
    drawn = [words(316, 32, title, 22, bold=True)]
    for x, name, stages in [(164, "Gluon", GLUON), (468, "PyTorch", PYTORCH)]:
        drawn.append(words(x, 76, name, 24, bold=True))
        y = 92
        for place, (text, kind) in enumerate(stages):
            if text:
                fill, edge = FILLS[kind]
                drawn.append(box(x - 140, y, 280, 44, fill, edge, stroke_width=3, rx=6))
                drawn.append(words(x, y + 30, text, 20, bold=kind == "divides"))
            if place + 1 < len(stages):
                if stages[place + 1][0]:
                    drawn.append(arrow(x, y + 46, x, y + 68, width=3))
                else:  # nothing happens in the next row
                    drawn.append(line(x, y + 46, x, y + 116, width=3))
            y += 70
    return page(632, y - 16, title,
                "Both begin with w = 0 and the losses 9, 36, 81 and 144, and end with w = 1.8. "
                "Gluon: gradient -180, then step(4) divides by 4. PyTorch: the mean divides by 4, "
                "gradient -45, and step() doesn't divide.", drawn)


def draw_data_parallel():
    """Two panels of three GPUs: a weight and its copies; their gradients add up in it."""
    drawn = []
    for left, name in [(0, "forward: w is copied"), (328, "back: gradients add up")]:
        drawn.append(words(left + 152, 32, name, 22, bold=True))
        for gpu in range(3):
            x = left + 2 + 104 * gpu
            drawn.append(box(x, 48, 92, 264, PALE_GREY, "none", rx=8))
            drawn.append(words(x + 46, 300, f"GPU {gpu}", 20))

    copies, gradients, ways = [], [], []
    for gpu, gradient in enumerate(GRADIENTS):
        x = 48 + 104 * gpu
        ways.append(arrow(48 + 8 * gpu, 122, x, 204, BLUE, 5))
        copies.append(box(x - 38, 210, 76, 50, PALE_BLUE, BLUE, stroke_width=3, rx=6))
        copies.append(words(x, 242, "copy" if gpu else "itself", 20))  # GPU 0 has it already
        x += 328
        ways.append(arrow(x, 206, 376 + 14 * gpu, 128, ORANGE, 5))
        gradients.append(box(x - 38, 210, 76, 50, PALE_ORANGE, ORANGE, stroke_width=3, rx=6))
        gradients.append(words(x, 242, str(gradient), 22))
    originals = [box(10, 66, 76, 52, BLUE, "black", stroke_width=3, rx=6),
                 words(48, 99, "w", 24, fill="white"),
                 box(338, 66, 76, 52, ORANGE, "black", stroke_width=3, rx=6),
                 words(376, 99, str(sum(GRADIENTS)), 24, bold=True)]
    drawn += [*ways, group(copies), group(gradients, class_="gradients"),
              group(originals, class_="originals")]
    return page(632, 320, "A weight in DataParallel, forward and backward",
                "Forward, a broadcast: GPU 0 uses the weight itself, GPUs 1 and 2 use copies. "
                "Backward, a reduce: the gradients 1, 10 and 100 of the three uses add up to 111 "
                "on GPU 0.",
                drawn)


DRAWINGS = {"one_step_twice": draw_one_step_twice, "data_parallel": draw_data_parallel}

if __name__ == "__main__":
    write(DRAWINGS)
