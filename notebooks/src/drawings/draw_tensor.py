"""The drawings of chapter 18: two matrices on two ranks, forward and backward; a block.

Run it to write three SVG files beside it, the same bytes each time. The numbers of the matrices are
computed here from those of the chapter's first cell.
"""

from elements import (
    DARK_GREEN, FRAME, GREY, LIGHT_GREY, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow,
    box, group, line, page, words, write,
)

X = [[1, 2]]
A = [[1, 2, 0, -1], [1, -2, 2, 1]]
B = [[1, 2], [3, 1], [0, 1], [2, 0]]
CELL = 32
PALE = [PALE_BLUE, PALE_ORANGE]


def times(left, right):
    return [[sum(a * b for a, b in zip(row, column)) for column in zip(*right)] for row in left]


def transposed(matrix):
    return [list(row) for row in zip(*matrix)]


def relu(matrix):
    return [[max(0, number) for number in row] for row in matrix]


def two_halves(rank):
    """What a rank computes: (middle before ReLU, middle, part of y), forward; then backward the
    gradients of the middle and of x, where that of y is 1, 1."""
    mine = slice(2 * rank, 2 * rank + 2)
    columns, rows = [row[mine] for row in A], B[mine]
    before = times(X, columns)
    middle = relu(before)
    of_middle = times([[1, 1]], transposed(rows))
    of_middle = [[gradient if number > 0 else 0
                  for gradient, number in zip(of_middle[0], before[0])]]
    return before, middle, times(middle, rows), of_middle, times(of_middle, transposed(columns))


def text_of(number):
    return str(number).replace("-", "−")


def matrix(x, y, numbers, fill, held=None, **attributes):
    """A grid of numbers; cells that aren't `held(row, column)` stay empty."""
    drawn = []
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            mine = held is None or held(i, j)
            left, top = x + CELL * j, y + CELL * i
            drawn.append(box(left, top, CELL, CELL, fill if mine else "white",
                             FRAME if mine else LIGHT_GREY))
            if mine:
                drawn.append(words(left + CELL / 2, top + 22, text_of(number)))
    return group(drawn, **attributes)


def wide(numbers, rank):
    """Two numbers of four: the others are another rank's."""
    empty = [0, 0]
    return [numbers[0] + empty if rank == 0 else empty + numbers[0]]


def is_mine(rank):
    return lambda i, j: j // 2 == rank


LEFT = {"x": 6, "A": 84, "middle": 230, "B": 376, "part": 472, "sum": 570}


def headings(names, y=24):
    return [words(LEFT[place] + CELL * width / 2, y, text, bold=True)
            for place, text, width in names]


def the_sum(numbers, tops, forward):
    """The sum beside both parts, and the exchange between the ranks."""
    x = LEFT["sum"] if forward else LEFT["x"]
    drawn = []
    for rank, top in enumerate(tops):
        drawn.append(matrix(x, top + 48, numbers, PALE_GREY, class_="sum", data_rank=rank))
    middle = x + CELL
    drawn.append(line(middle, tops[0] + 88, middle, tops[1] + 40, ORANGE, 5))
    for tip, other in ((tops[0] + 84, tops[0] + 110), (tops[1] + 44, tops[1] + 18)):
        drawn.append(arrow(middle, other, middle, tip, ORANGE, 5))
    return drawn


def draw_two_matrices():
    tops = (40, 194)
    drawn = headings([("x", "x", 2), ("A", "columns of A", 4), ("middle", "middle", 4),
                      ("B", "rows of B", 2), ("part", "part", 2), ("sum", "y", 2)])
    total = times(relu(times(X, A)), B)
    for rank, top in enumerate(tops):
        before, middle, part, _, _ = two_halves(rank)
        drawn.append(matrix(LEFT["x"], top + 48, X, PALE_GREY))
        drawn.append(matrix(LEFT["A"], top + 32, A, PALE[rank], is_mine(rank), class_="A",
                            data_rank=rank))
        drawn.append(matrix(LEFT["middle"], top + 20, wide(before, rank), PALE[rank],
                            is_mine(rank), class_="before", data_rank=rank))
        drawn.append(words(LEFT["middle"] + 2 * CELL + (-CELL if rank == 0 else CELL), top + 72,
                           "ReLU"))
        drawn.append(matrix(LEFT["middle"], top + 82, wide(middle, rank), PALE[rank],
                            is_mine(rank), class_="middle", data_rank=rank))
        drawn.append(matrix(LEFT["B"], top, B, PALE[rank], lambda i, j, rank=rank: i // 2 == rank,
                            class_="B", data_rank=rank))
        drawn.append(matrix(LEFT["part"], top + 48, part, PALE[rank], class_="part",
                            data_rank=rank))
        drawn.append(words(6, top + 112, f"rank {rank}", anchor="start", bold=True))
        drawn.append(arrow(540, top + 64, 566, top + 64, GREY, 2))
    drawn += the_sum(total, tops, True)
    drawn.append(words(588, 188, "all-reduce", 18, anchor="end", bold=True, fill=DARK_GREEN))
    return page(640, 338, "Two matrices on two ranks, forward",
                "Two ranks, one below the other. Both have the input 1, 2. Rank 0 has the first "
                "two columns of A and the first two rows of B, rank 1 the others. Each computes "
                "two of four numbers in the middle, and a part of y: 3, 6 and 2, 4. An all-reduce "
                "gives both the sum 5, 10.", drawn)


def draw_two_matrices_backward():
    tops = (10, 140)
    drawn = [words(6, 24, "gradient of x", bold=True, anchor="start"),
             words(183, 24, "part", bold=True),
             words(634, 24, "gradient of y", bold=True, anchor="end")]
    parts = [two_halves(rank)[4] for rank in (0, 1)]
    total = [[a + b for a, b in zip(parts[0][0], parts[1][0])]]
    for rank, top in enumerate(tops):
        middle = top + 64
        drawn.append(matrix(LEFT["sum"], top + 48, [[1, 1]], PALE_GREY, class_="of-y"))
        drawn.append(arrow(564, middle, 506, middle, GREY, 2))
        drawn.append(box(280, middle - 30, 220, 60, PALE[rank], FRAME))
        drawn.append(words(390, middle - 5, f"rank {rank}", bold=True))
        drawn.append(words(390, middle + 18, "its rows and columns"))
        drawn.append(arrow(274, middle, 221, middle, GREY, 2))
        drawn.append(matrix(151, top + 48, parts[rank], PALE[rank], class_="of-x", data_rank=rank))
        drawn.append(arrow(145, middle, 76, middle, GREY, 2))
    drawn += the_sum(total, tops, False)
    drawn.append(words(54, 145, "all-reduce", 18, anchor="start", bold=True, fill=DARK_GREEN))
    return page(640, 250, "Two matrices on two ranks, backward",
                "The same two ranks, from right to left. Both have the gradient 1, 1 of y. Through "
                "its rows and columns each finds a part of the gradient of x: 3, 3 and −2, 4. An "
                "all-reduce gives both the sum 1, 7.", drawn)


def draw_block_on_ranks():
    drawn = []
    tops = (70, 160)
    parts = [("norm", 34, 62), ("heads", 150, 112), ("norm", 324, 62), ("MLP", 440, 112)]
    names = {("heads", 0): "heads 0, 1", ("heads", 1): "heads 2, 3",
             ("MLP", 0): "half of MLP", ("MLP", 1): "half of MLP"}
    for rank, top in enumerate(tops):
        drawn.append(line(4, top + 25, 612, top + 25, GREY, 2))
        drawn.append(arrow(600, top + 25, 636, top + 25, GREY, 2))
        for name, x, width in parts:
            fill = PALE_GREY if name == "norm" else PALE[rank]
            drawn.append(box(x, top, width, 50, fill, FRAME, class_="part", data_rank=rank))
            drawn.append(words(x + width / 2, top + 31, names.get((name, rank), name)))
        drawn.append(words(4, top - 10 if rank == 0 else top + 74, f"rank {rank}", anchor="start",
                           bold=True))
    for x, way in ((123, "backward"), (293, "forward"), (413, "backward"), (583, "forward")):
        forward = way == "forward"
        inside = [line(x, 95, x, 185, DARK_GREEN, 6)]
        for y in (95, 185):
            inside.append(box(x - 9, y - 9, 18, 18, DARK_GREEN, "none"))
        inside.append(words(x, 30 if forward else 262, "sum", bold=True))
        inside.append(words(x, 50 if forward else 282, way))
        if forward:
            inside.append(line(x, 56, x, 86, DARK_GREEN, 2))
        else:
            inside.append(line(x, 194, x, 244, DARK_GREEN, 2))
        drawn.append(group(inside, class_="exchange", data_way=way))
    return page(640, 296, "A block on two ranks: four points at which they exchange something",
                "A block, from left to right, on two ranks. Both have the whole norm. Rank 0 has "
                "heads 0 and 1, rank 1 heads 2 and 3; after another whole norm each has half of "
                "the MLP. Before attention and before the MLP a bar joins the ranks: a sum, "
                "backward. After each of them another: a sum, forward.", drawn)


DRAWINGS = {"two_matrices": draw_two_matrices,
            "two_matrices_backward": draw_two_matrices_backward,
            "block_on_ranks": draw_block_on_ranks}

if __name__ == "__main__":
    write(DRAWINGS)
