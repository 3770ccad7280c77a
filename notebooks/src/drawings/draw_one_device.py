"""The drawings of chapter 17: what a block keeps for each token, and how long it is kept.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREY, ORANGE, PALE_GREY, arrow, box, element, group, line, page, words, write,
)

WIDTH, HEADS, TOKENS, LAYERS = 64, 4, 32, 4
# What a block computes, and how many numbers each of it keeps for each token. A norm also keeps the
# mean and 1 / deviation of each token.
ROWS = [
    ("norm", WIDTH + 2),
    ("query, key, value", WIDTH),
    ("query × key", 2 * WIDTH),
    ("softmax, by heads", HEADS * TOKENS),
    ("weights × value", WIDTH),
    ("output projection", WIDTH),
    ("+", 0),
    ("norm", WIDTH + 2),
    ("up", WIDTH),
    ("GELU", 4 * WIDTH),
    ("down", 4 * WIDTH),
    ("+", 0),
]
ATTENTION = 7  # rows; the others are the MLP's
# Megabytes of a block's activations and of its input, for 16 sequences: a test holds them.
BLOCK, INPUT = 2.37, 0.13


def draw_block_keeps():
    left, wide, top, step = 64, 200, 114, 40
    drawn = [words(320, 26, "GELU and down keep the most", 22, bold=True),
             words(left + wide / 2, 66, "one block", 20, bold=True),
             words(304, 66, "numbers kept per token", 20, anchor="start", bold=True)]
    middle = left + wide / 2
    drawn.append(arrow(middle, 78, middle, top - 1, "black", 2))
    begin = top - 18  # where what came in branches off
    for row, (label, numbers) in enumerate(ROWS):
        y = top + step * row
        color = BLUE if row < ATTENTION else ORANGE
        if numbers:
            drawn.append(box(left, y, wide, 28, PALE_GREY, FRAME, rx=5))
            drawn.append(words(middle, y + 20, label))
            bar = box(304, y + 2, numbers, 24, color, "none", class_="kept", data_numbers=numbers)
            drawn.append(bar)
            drawn.append(words(304 + numbers + 8, y + 21, str(numbers), 20, anchor="start"))
        else:  # what came in is added
            drawn.append(element_plus(middle, y + 14))
            drawn.append(line(left - 26, begin, middle, begin, GREY, 2))
            drawn.append(line(left - 26, begin, left - 26, y + 14, GREY, 2))
            drawn.append(arrow(left - 26, y + 14, middle - 13, y + 14, GREY, 2))
            begin = y + 34
        if row + 1 < len(ROWS):
            drawn.append(arrow(middle, y + 28, middle, y + step - 1, "black", 1.5))
    end = top + step * len(ROWS)
    drawn.append(arrow(middle, end - 12, middle, end + 16, "black", 2))
    total = sum(numbers for _, numbers in ROWS)
    drawn.append(words(304, end - 2, f"together {total:,}", 20, anchor="start", bold=True,
                       class_="together", data_numbers=total))
    for text, first, last, color in [("attention", 0, 5, BLUE), ("MLP", 7, 10, "#8a5c00")]:
        begin, stop = top + step * first + 2, top + step * last + 26
        y = (begin + stop) / 2
        drawn.append(line(610, begin, 610, stop, color, 3))
        drawn.append(words(630, y, text, 20, bold=True, fill=color,
                           transform=f"rotate(-90 630 {y:g})"))
    return page(640, end + 24, "What one block keeps for its backward pass",
                "A block from top to bottom: norm, the matrices of query, key and value, query "
                "times key, softmax, weights times value, output projection, plus what came in; "
                "norm, up, GELU, down, plus what came in. Beside each a bar with the numbers that "
                "it keeps for each token: 66, 64, 128, 128, 64, 64; 66, 64, 256, 256; together "
                "1,156.", drawn)


def element_plus(x, y):
    """A circle with a plus in it."""
    return group([box(x - 13, y - 13, 26, 26, "white", "black", rx=13),
                  line(x - 7, y, x + 7, y, "black", 2), line(x, y - 7, x, y + 7, "black", 2)])


def lives(recomputed):
    """For each block when its activations grow and when they go: [(begin, full, goes, end)].

    The unit is a block's forward pass; its backward pass takes two. Besides, when the step ends.
    """
    spans = []
    clock = LAYERS
    for block in range(LAYERS, 0, -1):
        begin = clock if recomputed else block - 1
        clock += 1 if recomputed else 0
        spans.append((begin, begin + 1, clock, clock + 2))
        clock += 2
    return spans[::-1], clock


def draw_saw():
    unit, scale, left = 33, 48, 66  # pixels: a forward pass of a block, its activations
    thin = scale * INPUT / BLOCK
    drawn = [words(320, 26, "Recomputing needs less memory, and more time", 22, bold=True)]
    for title, floor, recomputed in [("all activations of blocks 1 to 4 are kept", 286, False),
                                     ("only inputs are kept, the rest is recomputed", 430, True)]:
        spans, end = lives(recomputed)
        top = floor - scale * (1.3 if recomputed else LAYERS)
        drawn.append(words(left, top - 16, title, 20, anchor="start", bold=True))
        for place, span in enumerate(spans):
            base = floor - place * (thin if recomputed else scale)
            begin, full, goes, stop = [left + unit * clock for clock in span]
            if recomputed:  # its input is there from its forward pass on
                drawn.append(box(left + unit * place, base - thin, begin - left - unit * place,
                                 thin, GREY, "none", class_="input", data_block=place + 1))
            corners = [(begin, base), (full, base - scale), (goes, base - scale), (stop, base)]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            drawn.append(element("polygon", points=points, fill=ORANGE if recomputed else BLUE,
                                 stroke="white", class_="life", data_recomputed=int(recomputed),
                                 data_block=place + 1, data_begin=span[0], data_end=span[3]))
            drawn.append(words((full + goes) / 2 + 6, base - 11, str(place + 1), 20, bold=True,
                               fill="black" if recomputed else "white"))
        drawn.append(line(left, floor, left + unit * 16.6, floor, "black", 2))
        drawn.append(line(left + unit * LAYERS, top - 8, left + unit * LAYERS, floor + 6, GREY, 2,
                          stroke_dasharray="5 4"))
        drawn.append(line(left + unit * end, floor - 8, left + unit * end, floor + 6, "black", 3))
        for place, text in [(2, "forward"), (7.6, "backward"), (end, "end")]:
            drawn.append(words(left + unit * place, floor + 24, text))
    drawn.append(words(26, 200, "memory", transform="rotate(-90 26 200)"))
    drawn.append(arrow(44, 286, 44, 106, "black", 2))
    drawn.append(words(left + 4, 418, "inputs", anchor="start"))
    drawn.append(words(left + unit * 16.6, 480, "time →", anchor="end"))
    return page(640, 490, "Activations during a step: a hill, and a saw",
                "Two panels over the same time. All are kept: the activations of blocks 1 to 4 "
                "pile up in the forward pass, four high, and go one after the other in the "
                "backward pass, block 4 first; it ends after 12 units. Recomputed: a thin layer "
                "of inputs, and in the backward pass four teeth, for blocks 4, 3, 2 and 1, each "
                "one block high; it ends after 16 units.", drawn)


DRAWINGS = {"block_keeps": draw_block_keeps, "saw": draw_saw}

if __name__ == "__main__":
    write(DRAWINGS)
