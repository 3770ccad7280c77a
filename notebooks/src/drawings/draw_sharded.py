"""The drawings of chapter 16: who holds what in ZeRO's stages, and the life of a gathered weight.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import BLUE, FRAME, GREEN, GREY, ORANGE, arrow, box, group, line, page, words, write

RANKS = 4
KINDS = ("weights", "gradients", "state")  # stage s divides the last s of them
COLORS = {"weights": BLUE, "gradients": ORANGE, "state": GREEN}
TITLES = ("data parallel: all copied", "stage 1: state divided", "stage 2: gradients, too",
          "stage 3: all divided")
LAYERS = ("layer 3", "layer 4")


def held(stage, kind, rank):
    """The quarters of `kind` that `rank` holds in a stage; 0 is plain data parallelism."""
    divided = len(KINDS) - KINDS.index(kind) <= stage
    return [rank] if divided else list(range(RANKS))


def holding(x, y, width, height, kind, quarters, **attributes):
    """What one rank holds of one kind: its quarters in colour, in a frame."""
    drawn = [box(x, y, width, height, "white", "none")]
    for quarter in quarters:
        drawn.append(box(x + quarter * width / RANKS, y, width / RANKS, height, COLORS[kind],
                         "none", class_="quarter", data_quarter=quarter))
    drawn.append(box(x, y, width, height, "none", FRAME))
    return group(drawn, class_="holding", data_kind=kind, **attributes)


def draw_who_holds_what():
    drawn = []
    for stage, title in enumerate(TITLES):
        left = 2 + 322 * (stage % 2)
        top = 8 + 208 * (stage // 2)
        drawn.append(words(left + 158, top + 22, title, 20, bold=True))
        for rank in range(RANKS):
            drawn.append(words(left + 118 + 52 * rank, top + 48, str(rank)))
        drawn.append(words(left + 78, top + 48, "rank", anchor="end"))
        for row, kind in enumerate(KINDS):
            y = top + 58 + 44 * row
            drawn.append(words(left + 84, y + 24, kind, anchor="end"))
            for rank in range(RANKS):
                drawn.append(holding(left + 96 + 52 * rank, y, 44, 34, kind,
                                     held(stage, kind, rank), data_stage=stage, data_rank=rank))
    return page(640, 412, "Who holds what in stages 0 to 3, on four ranks",
                "Four panels. In data parallelism each of four ranks holds all weights, all "
                "gradients and all of the optimizer's state. In stage 1 each holds a quarter of "
                "the state, in stage 2 also a quarter of the gradients, in stage 3 a quarter of "
                "everything.", drawn)


def draw_gathered_weight():
    drawn = [words(230, 30, "forward", 20, bold=True), words(478, 30, "backward", 20, bold=True),
             line(354, 12, 354, 292, GREY, 1)]
    whole = {"layer 3": ((110, 200), (486, 576)), "layer 4": ((214, 304), (366, 456))}
    for row, layer in enumerate(LAYERS):
        floor = 148 + 122 * row
        drawn.append(words(10, floor - 2, layer, anchor="start", bold=True))
        drawn.append(box(100, floor - 10, 510, 10, BLUE, "none", class_="shard", data_layer=layer))
        for number, (begin, end) in enumerate(whole[layer]):
            drawn.append(box(begin, floor - 66, end - begin, 66, BLUE, "black", class_="whole",
                             data_layer=layer, data_pass=["forward", "backward"][number]))
            drawn.append(words((begin + end) / 2, floor - 27, "whole", 20, bold=True,
                               fill="white"))
            drawn.append(arrow(begin + 1, floor - 88, begin + 1, floor - 66, "black", 3))
            drawn.append(words(begin + 8, floor - 72, "gather", anchor="start"))
            drawn.append(words(end + 4, floor - 72, "free", anchor="start"))
            if number == 1:
                drawn.append(arrow(end, floor, end, floor + 24, ORANGE, 4, class_="gradient"))
    drawn.append(words(40, 30, "time →", 18))
    drawn.append(words(624, 318, "gradient, to be reduced", anchor="end"))
    drawn.append(words(100, 318, "thin: the shard, always there", anchor="start"))
    return page(640, 332, "A weight is whole only while its layer computes",
                "Two rows, one for each of the last two of four layers, from left to "
                "right in time. A thin bar, the rank's shard, is always there. In the forward "
                "pass layer 3 is gathered, used and freed, then layer 4. In the backward pass "
                "layer 4 is gathered again, used and freed, then layer 3, and each sends its "
                "gradient to be reduced.", drawn)


DRAWINGS = {"who_holds_what": draw_who_holds_what, "gathered_weight": draw_gathered_weight}

if __name__ == "__main__":
    write(DRAWINGS)
