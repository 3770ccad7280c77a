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
CELL = 30
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


LEFT = {"x": 4, "A": 94, "middle": 248, "B": 398, "part": 488, "sum": 576}


def title(text):
    return words(320, 26, text, 22, bold=True)


def headings(names, y):
    return [words(LEFT[place] + CELL * width / 2, y, text, bold=True)
            for place, text, width in names]


def between(left, width, right, y, sign):
    """A sign in the middle between two matrices."""
    return words((LEFT[left] + CELL * width + LEFT[right]) / 2, y + 7, sign, 22, bold=True)


def the_sum(numbers, middles, forward):
    """The sum beside both parts, and the exchange between the ranks."""
    x = LEFT["sum"] if forward else LEFT["x"]
    drawn = []
    for rank, middle in enumerate(middles):
        drawn.append(matrix(x, middle - CELL / 2, numbers, PALE_GREY, class_="sum",
                            data_rank=rank))
    x = CELL + (LEFT["part"] if forward else 153)  # the exchange joins the parts
    drawn.append(line(x, middles[0] + 24, x, middles[1] - 24, ORANGE, 5))
    for tip, other in ((middles[0] + 20, middles[0] + 46), (middles[1] - 20, middles[1] - 46)):
        drawn.append(arrow(x, other, x, tip, ORANGE, 5))
    return drawn


def draw_two_matrices():
    tops = (72, 236)
    drawn = [title("A by columns, B by rows: one sum at the end")]
    drawn += headings([("x", "x", 2), ("A", "columns of A", 4), ("middle", "middle", 4),
                       ("B", "rows of B", 2), ("part", "part", 2), ("sum", "y", 2)], 60)
    total = times(relu(times(X, A)), B)
    second = 60  # from the middle of the first product to that of the second
    for rank, top in enumerate(tops):
        before, middle, part, _, _ = two_halves(rank)
        first, then = top + CELL, top + CELL + second
        mine = LEFT["middle"] + CELL * (1 if rank == 0 else 3)
        drawn.append(matrix(LEFT["x"], first - CELL / 2, X, PALE_GREY))
        drawn.append(between("x", 2, "A", first, "×"))
        drawn.append(matrix(LEFT["A"], top, A, PALE[rank], is_mine(rank), class_="A",
                            data_rank=rank))
        drawn.append(between("A", 4, "middle", first, "="))
        drawn.append(matrix(LEFT["middle"], first - CELL / 2, wide(before, rank), PALE[rank],
                            is_mine(rank), class_="before", data_rank=rank))
        drawn.append(arrow(mine, first + 17, mine, then - 17, GREY, 2))
        drawn.append(words(mine + 8 if rank == 0 else mine - 8, first + 36, "ReLU",
                           anchor="start" if rank == 0 else "end"))
        drawn.append(matrix(LEFT["middle"], then - CELL / 2, wide(middle, rank), PALE[rank],
                            is_mine(rank), class_="middle", data_rank=rank))
        drawn.append(between("middle", 4, "B", then, "×"))
        drawn.append(matrix(LEFT["B"], then - 2 * CELL, B, PALE[rank],
                            lambda i, j, rank=rank: i // 2 == rank, class_="B", data_rank=rank))
        drawn.append(between("B", 2, "part", then, "="))
        drawn.append(matrix(LEFT["part"], then - CELL / 2, part, PALE[rank], class_="part",
                            data_rank=rank))
        drawn.append(words(LEFT["x"], then + 7, f"rank {rank}", anchor="start", bold=True))
        drawn.append(arrow(LEFT["part"] + 2 * CELL + 4, then, LEFT["sum"] - 3, then, GREY, 2))
    drawn += the_sum(total, [top + CELL + second for top in tops], True)
    drawn.append(words(532, (tops[0] + tops[1]) / 2 + CELL + second + 6, "all-reduce", 18,
                       anchor="start", bold=True, fill=DARK_GREEN))
    return page(640, 396, "Two matrices on two ranks, forward",
                "Two ranks, one below the other. Both have the input 1, 2. Rank 0 has the first "
                "two columns of A and the first two rows of B, rank 1 the others. Each computes "
                "two of four numbers in the middle, and a part of y: 3, 6 and 2, 4. An all-reduce "
                "gives both the sum 5, 10.", drawn)


def draw_two_matrices_backward():
    middles = (106, 236)
    drawn = [title("The gradient of x is a sum: one part from each rank"),
             words(4, 68, "gradient of x", bold=True, anchor="start"),
             words(183, 68, "part", bold=True),
             words(636, 68, "gradient of y", bold=True, anchor="end")]
    parts = [two_halves(rank)[4] for rank in (0, 1)]
    total = [[a + b for a, b in zip(parts[0][0], parts[1][0])]]
    for rank, middle in enumerate(middles):
        drawn.append(matrix(LEFT["sum"], middle - CELL / 2, [[1, 1]], PALE_GREY, class_="of-y"))
        drawn.append(arrow(570, middle, 506, middle, GREY, 2))
        drawn.append(box(280, middle - 30, 220, 60, PALE[rank], FRAME))
        drawn.append(words(390, middle - 5, f"rank {rank}", bold=True))
        drawn.append(words(390, middle + 18, "its rows and columns"))
        drawn.append(arrow(274, middle, 219, middle, GREY, 2))
        drawn.append(matrix(153, middle - CELL / 2, parts[rank], PALE[rank], class_="of-x",
                            data_rank=rank))
        drawn.append(arrow(147, middle, 70, middle, GREY, 2))
    drawn += the_sum(total, middles, False)
    drawn.append(words(197, 177, "all-reduce", 18, anchor="start", bold=True, fill=DARK_GREEN))
    return page(640, 280, "Two matrices on two ranks, backward",
                "The same two ranks, from right to left. Both have the gradient 1, 1 of y. Through "
                "its rows and columns each finds a part of the gradient of x: 3, 3 and −2, 4. An "
                "all-reduce gives both the sum 1, 7.", drawn)


def draw_block_on_ranks():
    drawn = [title("Each rank has half of the heads, and half of the MLP")]
    tops = (104, 194)
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
    middles = [top + 25 for top in tops]
    for x, way in ((123, "backward"), (293, "forward"), (413, "backward"), (583, "forward")):
        forward = way == "forward"
        dashed = {} if forward else {"stroke_dasharray": "7 5"}
        inside = [line(x, middles[0] + 9, x, middles[1] - 9, DARK_GREEN, 6, **dashed)]
        for y in middles:
            inside.append(box(x - 9, y - 9, 18, 18, DARK_GREEN if forward else "white", DARK_GREEN,
                              stroke_width=3))
        y = middles[0] - 54 if forward else middles[1] + 65
        inside.append(words(min(x, 576), y, "sum in the", bold=True))
        inside.append(words(min(x, 576), y + 20, f"{way} pass", bold=True))
        drawn.append(group(inside, class_="exchange", data_way=way))
    return page(640, 308, "A block on two ranks: four points at which they exchange something",
                "A block, from left to right, on two ranks. Both have the whole norm. Rank 0 has "
                "heads 0 and 1, rank 1 heads 2 and 3; after another whole norm each has half of "
                "the MLP. Before attention and before the MLP a dashed bar joins the ranks: a "
                "sum in the backward pass. After each of them another bar: a sum in the forward "
                "pass.", drawn)


DRAWINGS = {"two_matrices": draw_two_matrices,
            "two_matrices_backward": draw_two_matrices_backward,
            "block_on_ranks": draw_block_on_ranks}

if __name__ == "__main__":
    write(DRAWINGS)
