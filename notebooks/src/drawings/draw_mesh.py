"""The drawings of chapter 20: meshes of four and of eight ranks.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE,
    FRAME,
    GREEN,
    ORANGE,
    PALE_BLUE,
    box,
    line,
    page,
    words,
    write,
)

ROWS, COLUMNS = 2, 2  # data ranks, tensor ranks
EXAMPLES = 12  # of a batch


def rank_at(row, column):
    return row * COLUMNS + column


def draw_mesh_groups():
    left, top, step_x, step_y, size = 236, 96, 176, 124, 72
    drawn = []
    for row in range(ROWS):
        y = top + row * step_y
        drawn.append(box(left - 26, y - 10, step_x + size + 52, size + 20, PALE_BLUE, "none",
                         rx=20, class_="tensor-group"))
        first = row * EXAMPLES // ROWS
        drawn.append(words(left - 40, y + 32, f"examples {first}–{first + EXAMPLES // ROWS - 1}",
                           anchor="end"))
        drawn.append(words(left - 40, y + 56, "tensor group", anchor="end", bold=True, fill=BLUE))
    for column, part in enumerate(["first half of", "second half of"]):
        x = left + column * step_x
        drawn.append(box(x - 13, top - 22, size + 26, step_y + size + 44, "none", ORANGE, rx=20,
                         stroke_width=4, class_="data-group"))
        drawn.append(words(x + size / 2, 26, part))
        drawn.append(words(x + size / 2, 50, "each matrix"))
        drawn.append(words(x + size / 2, top + step_y + size + 48, "data group", bold=True,
                           fill="#8a5f00"))
    for row in range(ROWS):
        for column in range(COLUMNS):
            x, y = left + column * step_x, top + row * step_y
            number = rank_at(row, column)
            drawn.append(box(x, y, size, size, "white", FRAME, rx=8))
            drawn.append(words(x + size / 2, y + 30, "rank"))
            drawn.append(words(x + size / 2, y + 57, str(number), 24, bold=True, class_="rank",
                               data_row=row, data_column=column))
    return page(640, 364, "A mesh of 2 by 2 ranks and its four groups",
                "Ranks 0 and 1 in the upper row have the examples 0 to 5 and are a tensor group, "
                "ranks 2 and 3 in the lower row have the examples 6 to 11 and are another. Ranks 0 "
                "and 2 in the left column have the first half of each matrix and are a data group, "
                "ranks 1 and 3 in the right column have the second half and are another.", drawn)


# --- a mesh of three dimensions: a cube, whose edges are groups of two ---

EDGES = {  # of a dimension: how far it leads, colour, dashes, what its two ranks have different
    "data": ((116, -74), ORANGE, "none", "other examples"),
    "pipeline": ((0, 152), GREEN, "3 6", "other layers"),
    "tensor": ((152, 0), BLUE, "14 6", "other halves of matrices"),
}


def corner(data, pipeline, tensor):
    """The middle of a rank's square."""
    x, y = 46, 122
    for number, (step, *_) in zip((data, pipeline, tensor), EDGES.values()):
        x += number * step[0]
        y += number * step[1]
    return x, y


def draw_mesh_of_eight():
    drawn = []
    ranks = [(data, pipeline, tensor) for data in range(2) for pipeline in range(2)
             for tensor in range(2)]
    for direction, (name, (_, color, dashes, _)) in enumerate(EDGES.items()):
        for rank in ranks:
            if rank[direction] == 0:
                other = list(rank)
                other[direction] = 1
                drawn.append(line(*corner(*rank), *corner(*other), color, 7, class_="edge",
                                  data_dimension=name, stroke_dasharray=dashes))
    for number, rank in enumerate(ranks):
        x, y = corner(*rank)
        drawn.append(box(x - 19, y - 19, 38, 38, "white", FRAME, rx=6))
        drawn.append(words(x, y + 8, str(number), 24, bold=True, class_="rank"))
    y = 62
    drawn.append(words(366, y - 28, "a line joins two ranks", anchor="start"))
    for (name, (_, color, dashes, differs)), partner in zip(EDGES.items(), (4, 2, 1)):
        drawn.append(line(366, y, 424, y, color, 7, stroke_dasharray=dashes))
        drawn.append(words(436, y + 7, f"{name} group", 20, bold=True, anchor="start"))
        drawn.append(words(366, y + 34, differs, anchor="start"))
        drawn.append(words(366, y + 58, f"rank 0 is with rank {partner}", anchor="start",
                           class_="partner", data_dimension=name))
        y += 100
    return page(640, 340, "A mesh of 2 by 2 by 2 ranks: each is in three groups",
                "Eight ranks at the corners of a cube. Its edges are groups of two ranks, four in "
                "each direction. Rank 0 is in a data group with rank 4, which has other examples, "
                "in a pipeline group with rank 2, which has other layers, and in a tensor group "
                "with rank 1, which has the other half of each matrix.", drawn)


DRAWINGS = {"mesh_groups": draw_mesh_groups, "mesh_of_eight": draw_mesh_of_eight}

if __name__ == "__main__":
    write(DRAWINGS)
