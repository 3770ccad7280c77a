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
    left, top, step_x, step_y, size = 236, 154, 176, 124, 72
    drawn = [words(320, 26, "A row has the same examples, a column the same half", 22, bold=True)]
    for row in range(ROWS):
        y = top + row * step_y
        drawn.append(box(left - 26, y - 10, step_x + size + 52, size + 20, PALE_BLUE, "none",
                         rx=20, class_="tensor-group"))
        first = row * EXAMPLES // ROWS
        drawn.append(words(left - 40, y + 32, "tensor group", anchor="end", bold=True, fill=BLUE))
        last = first + EXAMPLES // ROWS - 1
        drawn.append(words(left - 40, y + 56, f"same examples {first}–{last}", anchor="end"))
    for column, part in enumerate(["same first half", "same second half"]):
        x = left + column * step_x
        drawn.append(box(x - 13, top - 22, size + 26, step_y + size + 44, "none", ORANGE, rx=20,
                         stroke_width=4, class_="data-group"))
        for line_of, (text, look) in enumerate([
                ("data group", {"bold": True, "fill": "#8a5f00"}), (part, {}),
                ("of each matrix", {})]):
            drawn.append(words(x + size / 2, 70 + 24 * line_of, text, **look))
    for row in range(ROWS):
        for column in range(COLUMNS):
            x, y = left + column * step_x, top + row * step_y
            number = rank_at(row, column)
            drawn.append(box(x, y, size, size, "white", FRAME, rx=8))
            drawn.append(words(x + size / 2, y + 30, "rank"))
            drawn.append(words(x + size / 2, y + 57, str(number), 24, bold=True, class_="rank",
                               data_row=row, data_column=column))
    return page(640, 382, "A mesh of 2 by 2 ranks and its four groups",
                "Ranks 0 and 1 in the upper row have the examples 0 to 5 and are a tensor group, "
                "ranks 2 and 3 in the lower row have the examples 6 to 11 and are another. Ranks 0 "
                "and 2 in the left column have the first half of each matrix and are a data group, "
                "ranks 1 and 3 in the right column have the second half and are another.", drawn)


# --- a mesh of three dimensions: a cube, whose edges are groups of two ---

EDGES = {  # of a dimension: how far it leads, colour, dashes
    "data": ((170, -104), ORANGE, "none"),
    "pipeline": ((0, 172), GREEN, "3 6"),
    "tensor": ((230, 0), BLUE, "14 6"),
}
GROUPS = {  # at rank 0's edges: where, and what its two ranks have different
    "data": (160, 112, ["different examples"]),
    "pipeline": (96, 260, ["different layers"]),
    "tensor": (270, 216, ["different halves", "of matrices"]),
}


def corner(data, pipeline, tensor):
    """The middle of a rank's square."""
    x, y = 186, 176
    for number, (step, *_) in zip((data, pipeline, tensor), EDGES.values()):
        x += number * step[0]
        y += number * step[1]
    return x, y


def draw_mesh_of_eight():
    drawn = [words(320, 26, "Each rank is in three groups", 22, bold=True)]
    ranks = [(data, pipeline, tensor) for data in range(2) for pipeline in range(2)
             for tensor in range(2)]
    for direction, (name, (_, color, dashes)) in enumerate(EDGES.items()):
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
    for name, (x, y, differs) in GROUPS.items():
        drawn.append(words(x, y, f"{name} group", bold=True, class_="group",
                           data_dimension=name))
        for place, text in enumerate(differs):
            drawn.append(words(x, y + 24 * (place + 1), text))
    return page(640, 390, "A mesh of 2 by 2 by 2 ranks: each is in three groups",
                "Eight ranks at the corners of a cube. Its edges are groups of two ranks, four in "
                "each direction. Rank 0 is in a data group with rank 4, which has other examples, "
                "in a pipeline group with rank 2, which has other layers, and in a tensor group "
                "with rank 1, which has the other half of each matrix.", drawn)


DRAWINGS = {"mesh_groups": draw_mesh_groups, "mesh_of_eight": draw_mesh_of_eight}

if __name__ == "__main__":
    write(DRAWINGS)
