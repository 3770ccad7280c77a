"""The drawings of *Tokens and the vocabulary*: a block by tokens; a loss from three numbers.

Run it to write two SVG files beside it, the same bytes each time. The numbers of the loss are
computed here from the logits of the notebook's cell.
"""

from math import exp, log

from elements import (
    DARK_GREEN, FRAME, GREY, LIGHT_GREY, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow, box, group, line,
    page, words, write,
)

PALE = [PALE_BLUE, PALE_ORANGE]
CELL = 16
LOGITS = [[3, 1], [5, 2]]  # of rank 0, of rank 1
LABEL = 1


def grid(x, y, rank, by_tokens):
    """Four tokens, one below the other, by four numbers; what the rank has is coloured."""
    drawn = []
    for token in range(4):
        for number in range(4):
            mine = (token if by_tokens else number) // 2 == rank
            drawn.append(box(x + CELL * number, y + CELL * token, CELL, CELL,
                             PALE[rank] if mine else "white", FRAME if mine else LIGHT_GREY))
    return group(drawn, class_="by-tokens" if by_tokens else "by-columns", data_rank=rank)


def draw_block_by_tokens():
    drawn = []
    tops = (88, 192)
    places = [("norm", 44, True), ("attention", 194, False), ("norm", 344, True),
              ("MLP", 494, False)]
    for rank, top in enumerate(tops):
        drawn.append(line(4, top + 32, 612, top + 32, GREY, 2))
        drawn.append(arrow(600, top + 32, 636, top + 32, GREY, 2))
        for _, x, by_tokens in places:
            drawn.append(grid(x, top, rank, by_tokens))
        drawn.append(words(4, top - 10 if rank == 0 else top + 88, f"rank {rank}", anchor="start",
                           bold=True))
    for name, x, by_tokens in places:
        drawn.append(words(x + 32, 24, name, bold=True))
        drawn.append(words(x + 32, 46, "by tokens" if by_tokens else "by columns"))
    for x, name in ((151, "gather"), (301, "scatter"), (451, "gather"), (601, "scatter")):
        inside = [line(x, 120, x, 224, DARK_GREEN, 6)]
        for y in (120, 224):
            inside.append(box(x - 9, y - 9, 18, 18, DARK_GREEN, "none"))
        inside.append(line(x, 233, x, 282, DARK_GREEN, 2))
        if name == "scatter":
            inside.append(words(x, 302, "sum and", bold=True))
        inside.append(words(x, 302 if name == "gather" else 323, name, bold=True))
        drawn.append(group(inside, class_="exchange", data_name=name))
    return page(648, 336, "A block on two ranks, divided by tokens and by numbers in turn",
                "A block, from left to right, on two ranks. Grids of four tokens by four numbers "
                "show what each rank has: in the norms all numbers of two tokens, in attention and "
                "in the MLP two numbers of all tokens. Before attention and the MLP a bar joins "
                "the ranks, gather; after each of them another, sum and scatter.", drawn)


def text_of(number):
    return f"{number:.3f}" if number % 1 else f"{number:.0f}".replace("-", "−")


def three_numbers():
    """Of each rank and of both together: the largest logit, the sum, the label's logit."""
    largest = max(max(logits) for logits in LOGITS)
    rows = []
    for rank, logits in enumerate(LOGITS):
        here = LABEL // 2 == rank
        rows.append((max(logits), sum(exp(logit - largest) for logit in logits),
                     logits[LABEL % 2] - largest if here else 0))
    rows.append((largest, rows[0][1] + rows[1][1], rows[0][2] + rows[1][2]))
    return rows


def draw_three_numbers():
    rows = three_numbers()
    drawn = []
    columns = [(262, "largest"), (414, "sum of exp"), (566, "label")]
    drawn.append(words(133, 24, "logits", bold=True))
    for x, name in columns:
        drawn.append(words(x, 24, name, bold=True))
    drawn.append(words(414, 46, "less largest"))
    drawn.append(words(566, 46, "less largest"))
    for rank, top in enumerate((60, 124)):
        drawn.append(words(4, top + 27, f"rank {rank}", anchor="start", bold=True))
        for i, logit in enumerate(LOGITS[rank]):
            is_label = 2 * rank + i == LABEL
            drawn.append(box(85 + 48 * i, top, 48, 40, PALE[rank], "black" if is_label else FRAME,
                             stroke_width=4 if is_label else 1))
            drawn.append(words(109 + 48 * i, top + 27, text_of(logit), bold=is_label))
        cells = []
        for (x, _), number in zip(columns, rows[rank]):
            cells.append(box(x - 48, top, 96, 40, PALE[rank], FRAME))
            cells.append(words(x, top + 27, text_of(number)))
        drawn.append(group(cells, class_="part", data_rank=rank))
    cells = []
    for (x, _), number, way in zip(columns, rows[2], ("max", "sum", "sum")):
        drawn.append(arrow(x - 24, 166, x - 24, 206, DARK_GREEN, 4))
        drawn.append(words(x - 6, 192, way, anchor="start", bold=True, fill=DARK_GREEN))
        cells.append(box(x - 48, 208, 96, 40, PALE_GREY, FRAME))
        cells.append(words(x, 235, text_of(number)))
    drawn.append(group(cells, class_="together"))
    drawn.append(words(4, 235, "on both", anchor="start", bold=True))
    _, total, of_label = rows[2]
    drawn.append(words(320, 284, f"loss = log {text_of(total)} − ({text_of(of_label)}) = "
                       f"{text_of(log(total) - of_label)}", bold=True, class_="loss"))
    return page(640, 300, "The loss of one token from three numbers of each rank",
                "Rank 0 has the logits 3 and 1, rank 1 has 5 and 2; the label is the 1. The "
                "largest are 3 and 5, together 5. The sums of the exponentials of logits less 5 "
                f"are {rows[0][1]:.3f} and {rows[1][1]:.3f}, together {total:.3f}. The label's "
                "logit less 5 is −4 on rank 0, and rank 1 adds 0. The loss is the logarithm of "
                f"{total:.3f}, plus 4.", drawn)


DRAWINGS = {"block_by_tokens": draw_block_by_tokens, "three_numbers": draw_three_numbers}

if __name__ == "__main__":
    write(DRAWINGS)
