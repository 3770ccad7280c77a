"""The drawings of chapter 07: two devices' gradients, their sum, and the store that makes it.

Run it to write four SVG files beside it, the same bytes each time. All numbers are computed here
from two gradients, a weight, a limit and the sizes of three parameters.
"""

from elements import (
    BLUE, DARK_GREEN, FRAME, GREY, LIGHT_GREY, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, RED,
    arrow, box, element, group, line, page, words, write,
)

GRADIENTS = ((6, 0), (0, 8))  # of device 0 and of device 1
WEIGHT = (10, 10)
LIMIT = 5
SIZES = {"embedding": 20_000 * 64, "dense 1": 8 * 64 * 256, "dense 2": 256 * 10}  # entries
COLUMN = 158  # from one device of a panel to the next


def added(*vectors):
    """The sum of vectors."""
    return tuple(sum(numbers) for numbers in zip(*vectors))


def less(vector, other):
    """The difference of two vectors."""
    return tuple(a - b for a, b in zip(vector, other))


def norm(vector):
    """The length of a vector."""
    return sum(number**2 for number in vector) ** 0.5


def clipped(vector):
    """The vector, not longer than the limit."""
    factor = min(1, LIMIT / norm(vector))
    return tuple(factor * number for number in vector)


def text(vector):
    """A vector in brackets."""
    return "(" + ", ".join(f"{number:g}" for number in vector) + ")"


def owners(sizes, k):
    """The largest parameter first, each to the device with the least so far."""
    load, owner = [0] * k, {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


# ---- Pieces ----


def store(left, top, height, lines):
    """A store across the columns of two devices, with what is computed in it."""
    drawn = [box(left - 68, top, COLUMN + 136, height, PALE_GREY, "black", stroke_width=2, rx=10),
             words(left - 58, top + 23, "store", anchor="start")]
    for number, content in enumerate(lines):
        drawn.append(words(left + COLUMN / 2, top + 52 + 30 * number, content, 20, bold=True))
    return group(drawn, class_="store")


def device(x, top, height, rank, value):
    """A device and the vector that it holds."""
    drawn = [box(x - 68, top, 136, height, PALE_BLUE, BLUE, stroke_width=2, rx=6),
             words(x, top + height + 24, f"cpu({rank})"),
             words(x, top + 31, text(value), 20, bold=True)]
    return group(drawn, class_="device", data_device=rank, data_value=text(value))


def up(x, bottom, top, value):
    """A push: solid and blue, its vector at its beginning."""
    drawn = [arrow(x, bottom, x, top, BLUE, 4),
             words(x - 12, bottom - 10, text(value), 20, "end", bold=True)]
    return group(drawn, class_="push", data_value=text(value))


def down(x, top, bottom, value):
    """A pull: dashed and orange, its vector at its beginning."""
    drawn = [arrow(x, top, x, bottom, ORANGE, 4, dashed=True),
             words(x + 12, top + 24, text(value), 20, "start", bold=True)]
    return group(drawn, class_="pull", data_value=text(value))


# ---- The drawings ----


def draw_clipping():
    """Clipped after the sum, and before it."""
    total = added(*GRADIENTS)
    right = clipped(total)
    wrong = added(*map(clipped, GRADIENTS))
    left, low, unit = 240, 380, 40

    def place(vector):
        return left + unit * vector[0], low - unit * vector[1]

    radius = LIMIT * unit
    arc = element("path", d=f"M {left + radius} {low} A {radius} {radius} 0 0 0 {left} "
                  f"{low - radius}", fill="none", stroke=GREY, stroke_width=2,
                  stroke_dasharray="4 5")
    drawn = [line(left, low, left + 8 * unit, low, FRAME, 1),
             line(left, low, left, low - 8.6 * unit, FRAME, 1), arc,
             words(left + radius, low + 24, f"limit {LIMIT}")]
    for vector, color, width, kind, x, lines in (
            (total, LIGHT_GREY, 10, "total", 24, [f"the sum {text(total)}"]),
            (right, DARK_GREEN, 6, "right", None, []),
            (wrong, RED, 5, "wrong", 16, ["clipped on each device,", f"then added: {text(wrong)}"]),
    ):
        x2, y2 = place(vector)
        piece = [arrow(left, low, x2, y2, color, width, dashed=kind == "wrong")]
        for number, content in enumerate(lines):
            piece.append(words(x2 + x, y2 + 8 + 24 * number, content, 20, "start", bold=True,
                               fill="black" if kind == "total" else color))
        drawn.append(group(piece, class_=kind, data_value=text(vector)))
    x2, y2 = place(right)
    drawn += [line(left - 10, y2 - 2, x2 - 12, y2 - 2, DARK_GREEN, 1),
              words(left - 18, y2 - 8, "added, then", 20, "end", True, fill=DARK_GREEN),
              words(left - 18, y2 + 16, f"clipped: {text(right)}", 20, "end", True,
                    fill=DARK_GREEN)]
    return page(700, 424, "Gradients clipped after the sum, and before it",
                f"The sum of both gradients is the arrow {text(total)}. Added and then clipped to "
                f"{LIMIT} it is {text(right)}, in the same direction. Clipped on each device and "
                f"then added it is {text(wrong)}, longer than the limit and in another direction.",
                drawn)


def draw_push_pull():
    """What a push and a pull do."""
    total = text(added(*GRADIENTS))
    add = " + ".join(map(text, GRADIENTS))
    drawn = [words(350, 32, "Push adds up, pull copies", 22, bold=True),
             words(175, 72, "push", 20), words(525, 72, "pull", 20),
             line(350, 56, 350, 314, GREY, 1)]
    left, right = 96, 446
    drawn.append(store(left, 90, 64, [f"{add} = {total}"]))
    drawn.append(store(right, 90, 64, [total]))
    for rank, value in enumerate(GRADIENTS):
        x = left + COLUMN * rank
        drawn.append(device(x, 240, 46, rank, value=value))
        drawn.append(up(x, 236, 158, value))
        x = right + COLUMN * rank
        drawn.append(device(x, 240, 46, rank, value=added(*GRADIENTS)))
        drawn.append(down(x, 158, 236, added(*GRADIENTS)))
    return page(700, 328, "A push adds up the devices' arrays, a pull copies the sum to them",
                f"Left: cpu(0) pushes {text(GRADIENTS[0])}, cpu(1) pushes {text(GRADIENTS[1])}, "
                f"and the store holds their sum, {total}. Right: {total} is pulled from the store "
                "to both devices.", drawn)


def update(x, top, width, lines):
    """Where a weight is updated: the only orange box."""
    drawn = [box(x - width / 2, top, width, 12 + 28 * len(lines), PALE_ORANGE, ORANGE,
                 stroke_width=3, rx=6)]
    for number, content in enumerate(lines):
        drawn.append(words(x, top + 28 + 28 * number, content, 18, bold=True))
    return group(drawn, class_="update")


def draw_two_updates():
    """One update in the store, or one on each device."""
    total = added(*GRADIENTS)
    after = less(WEIGHT, total)
    subtract = f"{text(WEIGHT)} − {text(total)}"
    drawn = [words(175, 32, "the store updates, once", 22, bold=True),
             words(525, 32, "each device updates", 22, bold=True),
             line(350, 16, 350, 440, GREY, 1)]
    for name, left in (("store", 96), ("devices", 446)):
        in_store = name == "store"
        middle = left + COLUMN / 2
        panel = []
        for rank, gradient in enumerate(GRADIENTS):
            x = left + COLUMN * rank
            piece = [words(x, 70, f"cpu({rank})"),
                     box(x - 74, 80, 148, 62, PALE_BLUE, BLUE, stroke_width=2, rx=6),
                     words(x, 104, "gradient"), words(x, 130, text(gradient), 20, bold=True),
                     arrow(x, 144, x, 180, BLUE, 4)]
            panel.append(group(piece, class_="push", data_value=text(gradient)))
        panel += [box(left - 74, 184, COLUMN + 148, 96, PALE_GREY, "black", stroke_width=2, rx=10),
                  words(left - 64, 207, "store", anchor="start"),
                  words(middle, 212 if in_store else 242, f"sum {text(total)}", 20, bold=True)]
        if in_store:
            panel.append(update(middle, 226, 260, [f"{subtract} = {text(after)}"]))
        for rank in range(len(GRADIENTS)):
            x = left + COLUMN * rank
            pulled = after if in_store else total
            piece = [arrow(x, 284, x, 320, BLUE, 4),
                     box(x - 74, 324, 148, 62 if in_store else 112, PALE_BLUE, BLUE,
                         stroke_width=2, rx=6),
                     words(x, 414 if in_store else 460, f"cpu({rank})")]
            if in_store:
                piece += [words(x, 348, "weight"), words(x, 374, text(after), 20, bold=True)]
            else:
                piece += [words(x, 350, f"sum {text(total)}"),
                          update(x, 362, 140, [subtract, f"= {text(after)}"])]
            panel.append(group(piece, class_="pull", data_value=text(pulled),
                               data_weight=text(after)))
        drawn.append(group(panel, class_="panel", data_name=name))
    return page(700, 474, "Two ways to update: in the store, or on each device",
                f"In both panels cpu(0) has the gradient {text(GRADIENTS[0])} and cpu(1) "
                f"{text(GRADIENTS[1])}, and the store adds them to {text(total)}. Left: the store "
                f"updates the weight, {subtract} = {text(after)}, and sends {text(after)} to both "
                f"devices. Right: the store sends the sum to both, and each device updates, "
                f"{subtract} = {text(after)}.", drawn)


def draw_whose_memory():
    """What two devices hold, to scale: weights and gradients, and the buffers of what each owns."""
    unit, bottom, width = 16, 420, 260  # an MB is 16 units high
    owner = owners(SIZES, 2)
    whole = 4 * sum(SIZES.values()) / 1e6
    title = "cpu(0) adds the largest gradient, and needs more memory"
    drawn = [words(350, 34, title, 22, bold=True)]
    for rank, x in ((0, 55), (1, 385)):
        owned = 4 * sum(SIZES[name] for name in SIZES if owner[name] == rank) / 1e6
        blocks = [("weights and gradients", 2 * whole, PALE_GREY, "replica")]
        if owner["embedding"] == rank:
            blocks += [("buffer for the sum", owned, ORANGE, "buffer"),
                       ("buffer for cpu(1)'s gradient", owned, ORANGE, "buffer")]
        else:
            blocks.append(("", 2 * owned, ORANGE, "buffer"))
        top, held = bottom, []
        for content, megabytes, fill, kind in blocks:
            height = unit * megabytes
            top -= height
            piece = [box(x, top, width, height, fill, FRAME, stroke_width=2)]
            if content:
                piece.append(words(x + width / 2, top + height / 2 + 6, content))
            held.append(group(piece, class_=kind, data_mb=f"{megabytes:.3f}"))
        if owner["embedding"] != rank:
            held.append(words(x + width / 2, top - 12, "buffers for the dense layers"))
        held.append(line(x - 20, bottom + 2, x + width + 20, bottom + 2, BLUE, 4))
        held.append(words(x + width / 2, bottom + 30, f"cpu({rank})", 20, bold=True))
        drawn.append(group(held, class_="device", data_device=rank))
    drawn += [arrow(20, bottom, 20, 76, FRAME, 2), words(8, 66, "memory", anchor="start")]
    return page(700, 466, title,
                "To scale. Both devices hold weights and gradients, equally much. On cpu(0) two "
                "more blocks, as large as the embedding, are buffers: one for the sum and one for "
                "cpu(1)'s gradient. On cpu(1) the buffers are a thin block.", drawn)


DRAWINGS = {"clipping": draw_clipping, "push_pull": draw_push_pull,
            "two_updates": draw_two_updates, "whose_memory": draw_whose_memory}

if __name__ == "__main__":
    write(DRAWINGS)
