"""The drawings of chapter 20: a mesh of four ranks with its groups, and what each rank holds.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE,
    FRAME,
    GREEN,
    LIGHT_GREY,
    ORANGE,
    PALE_BLUE,
    box,
    group,
    page,
    words,
    write,
)

ROWS, COLUMNS = 2, 2  # data ranks, tensor ranks
EXAMPLES, UNITS, WIDTH = 12, 8, 4  # of a batch; between the block's matrices; of an example
SIDE = 10  # of a number's square


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


def grid(x, y, rows, columns, color, is_held, kind):
    """A matrix, of whose numbers a rank holds those with `is_held(row, column)`."""
    drawn = []
    for i in range(rows):
        for j in range(columns):
            held = is_held(i, j)
            drawn.append(box(x + j * SIDE, y + i * SIDE, SIDE, SIDE, color if held else "white",
                             FRAME if held else LIGHT_GREY, class_="held" if held else "left-out"))
    return group(drawn, class_="holding", data_kind=kind)


def everything(i, j):
    return True


def held_by(row, column, left, top):
    """What one rank holds: its examples, its parts of what is sharded, what is replicated."""

    def example(i, j):
        return i * ROWS // EXAMPLES == row

    def unit_of_up(i, j):
        return i * COLUMNS // UNITS == column

    def unit_of_down(i, j):
        return j * COLUMNS // UNITS == column

    number = rank_at(row, column)
    y = top + 64
    return group([
        box(left, top, 312, 196, "none", LIGHT_GREY, rx=8),
        words(left + 156, top + 24, f"rank {number}", 20, bold=True),
        words(left + 32, y - 10, "batch"),
        grid(left + 12, y, EXAMPLES, WIDTH, ORANGE, example, "batch"),
        words(left + 98, y - 10, "norm"),
        grid(left + 78, y, 2, WIDTH, GREEN, everything, "norm"),
        words(left + 168, y - 10, "up"),
        grid(left + 142, y, UNITS, WIDTH, BLUE, unit_of_up, "up.weight"),
        grid(left + 186, y, UNITS, 1, BLUE, unit_of_up, "up.bias"),
        words(left + 255, y - 10, "down"),
        grid(left + 208, y, WIDTH, UNITS, BLUE, unit_of_down, "down.weight"),
        grid(left + 292, y, WIDTH, 1, GREEN, everything, "down.bias"),
    ], data_rank=number)


def draw_held_on_the_mesh():
    drawn = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            drawn.append(held_by(row, column, 4 + 320 * column, 4 + 204 * row))
    for x, color, text in [(20, ORANGE, "its examples"), (190, BLUE, "its part of what is sharded"),
                           (474, GREEN, "replicated")]:
        drawn.append(box(x, 422, 16, 16, color, FRAME))
        drawn.append(words(x + 24, 436, text, anchor="start"))
    return page(640, 448, "What each rank holds on a mesh of 2 by 2",
                "Four panels, a rank in each. Ranks 0 and 1 hold the first half of the batch, "
                "ranks 2 and 3 the second. Ranks 0 and 2 hold the upper half of the matrix up and "
                "the left half of the matrix down, ranks 1 and 3 the other halves. All four hold "
                "the whole norm and the whole bias of down.", drawn)


DRAWINGS = {"mesh_groups": draw_mesh_groups, "held_on_the_mesh": draw_held_on_the_mesh}

if __name__ == "__main__":
    write(DRAWINGS)
