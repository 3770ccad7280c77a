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
    drawn = [words(324, 26, "Norms by tokens, attention and MLP by columns", 22, bold=True)]
    tops = (114, 218)
    places = [("norm", 74, True), ("attention", 218, False), ("norm", 362, True),
              ("MLP", 506, False)]
    for rank, top in enumerate(tops):
        drawn.append(line(64, top + 32, 612, top + 32, GREY, 2))
        drawn.append(arrow(600, top + 32, 646, top + 32, GREY, 2))
        for _, x, by_tokens in places:
            drawn.append(grid(x, top, rank, by_tokens))
        drawn.append(words(4, top + 39, f"rank {rank}", anchor="start", bold=True))
    for name, x, by_tokens in places:
        drawn.append(words(x + 32, 66, name, bold=True))
        drawn.append(words(x + 32, 90, "tokens (rows)" if by_tokens else "columns"))
    for x, name in ((178, "gather"), (322, "scatter"), (466, "gather"), (606, "scatter")):
        inside = [line(x, 146, x, 250, DARK_GREEN, 6)]
        for y in (146, 250):
            inside.append(box(x - 9, y - 9, 18, 18, DARK_GREEN, "none"))
        inside.append(line(x, 259, x, 290, DARK_GREEN, 2))
        if name == "scatter":
            inside.append(words(x, 310, "sum and", bold=True))
        inside.append(words(x, 310 if name == "gather" else 331, name, bold=True))
        drawn.append(group(inside, class_="exchange", data_name=name))
    return page(648, 344, "A block on two ranks, divided by tokens and by numbers in turn",
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
    largest = rows[2][0]
    drawn = [words(320, 26, "Three small all-reduces give the loss", 22, bold=True)]
    columns = [(238, "largest"), (388, f"Σ exp(logit − {largest})"),
               (556, f"label's logit − {largest}")]
    drawn.append(words(118, 72, "logits", bold=True))
    for x, name in columns:
        drawn.append(words(x, 72, name, bold=True))
    for rank, top in enumerate((88, 160)):
        drawn.append(words(4, top + 27, f"rank {rank}", anchor="start", bold=True))
        for i, logit in enumerate(LOGITS[rank]):
            is_label = 2 * rank + i == LABEL
            drawn.append(box(70 + 48 * i, top, 48, 40, PALE[rank], "black" if is_label else FRAME,
                             stroke_width=4 if is_label else 1))
            drawn.append(words(94 + 48 * i, top + 27, text_of(logit), bold=is_label))
            if is_label:
                drawn.append(words(94 + 48 * i, top + 60, "label"))
        cells = []
        for (x, _), number in zip(columns, rows[rank]):
            cells.append(box(x - 48, top, 96, 40, PALE[rank], FRAME))
            cells.append(words(x, top + 27, text_of(number)))
        drawn.append(group(cells, class_="part", data_rank=rank))
    cells = []
    for (x, _), number, way in zip(columns, rows[2], ("max", "sum", "sum")):
        drawn.append(arrow(x - 24, 202, x - 24, 242, DARK_GREEN, 4))
        drawn.append(words(x - 6, 228, way, anchor="start", bold=True, fill=DARK_GREEN))
        cells.append(box(x - 48, 244, 96, 40, PALE_GREY, FRAME))
        cells.append(words(x, 271, text_of(number)))
    drawn.append(group(cells, class_="together"))
    drawn.append(words(4, 271, "on both", anchor="start", bold=True))
    _, total, of_label = rows[2]
    drawn.append(words(320, 320, f"loss = log {text_of(total)} − ({text_of(of_label)}) = "
                       f"{text_of(log(total) - of_label)}", bold=True, class_="loss"))
    return page(640, 336, "The loss of one token from three numbers of each rank",
                "Rank 0 has the logits 3 and 1, rank 1 has 5 and 2; the label is the 1. The "
                "largest are 3 and 5, together 5. The sums of the exponentials of logits less 5 "
                f"are {rows[0][1]:.3f} and {rows[1][1]:.3f}, together {total:.3f}. The label's "
                "logit less 5 is −4 on rank 0, and rank 1 adds 0. The loss is the logarithm of "
                f"{total:.3f}, plus 4.", drawn)


DRAWINGS = {"block_by_tokens": draw_block_by_tokens, "three_numbers": draw_three_numbers}

if __name__ == "__main__":
    write(DRAWINGS)
