"""The drawings of chapter 16: who holds what in ZeRO's stages, and when a weight is whole.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import BLUE, FRAME, GREEN, GREY, ORANGE, box, group, line, page, words, write

RANKS = 4
KINDS = ("weights", "gradients", "state")  # stage s divides the last s of them
COLORS = {"weights": BLUE, "gradients": ORANGE, "state": GREEN}
TITLES = ("data parallel: all copied", "stage 1: state divided", "stage 2: gradients, too",
          "stage 3: all divided")
LAYERS = (1, 2, 3, 4)


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
    drawn = [words(320, 26, "On one rank: only the layer at work is whole", 22, bold=True),
             words(235, 66, "forward pass →", 20, bold=True),
             words(493, 66, "backward pass →", 20, bold=True),
             words(94, 96, "layer", anchor="end", bold=True),
             line(364, 50, 364, 314, GREY, 1)]
    for moment, at_work in enumerate([*LAYERS, *reversed(LAYERS)]):
        left = 108 + 64 * moment + 8 * (moment >= len(LAYERS))
        drawn.append(words(left + 26, 96, str(at_work), bold=True))
        for row, layer in enumerate(LAYERS):
            quarters = list(range(RANKS)) if layer == at_work else [0]
            drawn.append(holding(left, 112 + 52 * row, 52, 38, "weights", quarters,
                                 data_layer=layer, data_moment=moment))
    for row, layer in enumerate(LAYERS):
        drawn.append(words(94, 138 + 52 * row, f"weight {layer}", anchor="end"))
    return page(640, 326, "A weight is whole only while its layer computes",
                "What one of four ranks holds of four weights, at eight moments: while the layers "
                "1, 2, 3 and 4 compute in the forward pass, and 4, 3, 2 and 1 in the backward "
                "pass. The weight of the layer that computes is whole. Of each of the others "
                "there is a quarter.", drawn)


DRAWINGS = {"who_holds_what": draw_who_holds_what, "gathered_weight": draw_gathered_weight}

if __name__ == "__main__":
    write(DRAWINGS)
