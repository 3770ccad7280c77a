"""The drawings of chapter 07: what a key-value store does with two devices' arrays.

Run it to write three SVG files beside it, the same bytes each time. All numbers are computed here
from two gradients, a weight and four sizes.
"""

from elements import (
    BLUE, FRAME, GREY, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow, box, group, line, page,
    words, write,
)

GRADIENTS = (1, 20)  # of device 0 and of device 1
WEIGHT = 100
SIZES = {"a": 20, "b": 60, "c": 8, "d": 30}  # entries of four parameters
SCALE = 4  # units for an entry
COLUMN = 140  # from one device of a panel to the next


def largest_first(sizes, k):
    """Who owns which parameter: the largest first, each to the device with the least so far."""
    load, owner = [0] * k, {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


# ---- Pieces ----


def store(left, top, height, lines):
    """A store across the columns of two devices, with what is computed in it."""
    drawn = [box(left - 64, top, COLUMN + 128, height, PALE_GREY, "black", stroke_width=2, rx=10),
             words(left - 54, top + 23, "store", anchor="start")]
    for number, text in enumerate(lines):
        drawn.append(words(left + COLUMN / 2, top + 42 + 34 * number, text, 24, bold=True))
    return group(drawn, class_="store")


def device(x, top, height, rank, computes="", **holds):
    """A device and what it holds: names and numbers; one without a name stands alone."""
    drawn = [box(x - 64, top, 128, height, PALE_BLUE, BLUE, stroke_width=2, rx=6),
             words(x, top + height + 24, f"cpu({rank})")]
    y = top + 31
    if computes:
        drawn.append(words(x, y, computes, 20, bold=True))
        y += 34
    for name, value in holds.items():
        if name == "value":
            drawn.append(words(x, y, str(value), 24, bold=True))
        else:
            drawn.append(words(x - 56, y, name, anchor="start"))
            drawn.append(words(x + 56, y, str(value), 20, "end", bold=True))
        y += 32
    attributes = {f"data_{name}": value for name, value in holds.items()}
    return group(drawn, class_="device", data_device=rank, **attributes)


def block(x, low, width, name):
    """A parameter, as high as it has entries; the largest one is coloured."""
    height = SCALE * SIZES[name]
    largest = SIZES[name] == max(SIZES.values())
    frame = box(x - width / 2, low - height, width, height, PALE_ORANGE if largest else "white",
                ORANGE if largest else FRAME, stroke_width=2)
    return group([frame, words(x, low - height / 2 + 6.5, f"{name}: {SIZES[name]}", bold=True)],
                 class_="block", data_name=name)


def up(x, bottom, top, value):
    """A push: solid and blue."""
    drawn = [arrow(x, bottom, x, top, BLUE, 4), words(x - 12, (bottom + top) / 2 + 8, str(value),
                                                      22, "end", bold=True)]
    return group(drawn, class_="push", data_value=value)


def down(x, top, bottom, value):
    """A pull: dashed and orange."""
    drawn = [arrow(x, top, x, bottom, ORANGE, 4, dashed=True),
             words(x + 12, (bottom + top) / 2 + 8, str(value), 22, "start", bold=True)]
    return group(drawn, class_="pull", data_value=value)


# ---- The drawings ----


def draw_push_pull():
    """What a push and a pull do."""
    total = sum(GRADIENTS)
    drawn = [words(320, 32, "Push adds up, pull copies", 22, bold=True),
             words(160, 72, "push", 20), words(480, 72, "pull", 20),
             line(320, 56, 320, 314, GREY, 1)]
    left, right = 90, 410
    drawn.append(store(left, 90, 64, [f"{GRADIENTS[0]} + {GRADIENTS[1]} = {total}"]))
    drawn.append(store(right, 90, 64, [str(total)]))
    for rank, value in enumerate(GRADIENTS):
        x = left + COLUMN * rank
        drawn.append(device(x, 240, 46, rank, value=value))
        drawn.append(up(x, 236, 158, value))
        x = right + COLUMN * rank
        drawn.append(device(x, 240, 46, rank, value=total))
        drawn.append(down(x, 158, 236, total))
    return page(640, 328, "A push adds up the devices' arrays, a pull copies the sum to them",
                f"Left: cpu(0) pushes {GRADIENTS[0]}, cpu(1) pushes {GRADIENTS[1]}, and the store "
                f"holds their sum, {total}. Right: {total} is pulled from the store to both "
                "devices.", drawn)


def draw_two_updates():
    """Gradients in and weights out, or sums in and out."""
    total = sum(GRADIENTS)
    after = WEIGHT - total
    drawn = [words(162, 32, "the store updates", 22, bold=True),
             words(482, 32, "each device updates", 22, bold=True),
             words(162, 60, "gradients in, weights out"), words(482, 60, "gradients in, sums out"),
             line(320, 16, 320, 404, GREY, 1)]
    add = f"{GRADIENTS[0]} + {GRADIENTS[1]} = {total}"
    subtract = f"{WEIGHT} − {total}"
    for name, left in (("store", 92), ("devices", 412)):
        in_store = name == "store"
        panel = [store(left, 78, 96, [add, f"{subtract} = {after}"] if in_store else [add])]
        for rank, gradient in enumerate(GRADIENTS):
            x = left + COLUMN * rank
            top = 264
            if in_store:
                panel.append(device(x, top, 80, rank, weight=after, grad=gradient))
            else:
                panel.append(device(x, top, 114, rank, subtract, weight=after, grad=total))
            panel.append(up(x - 22, top - 4, 178, gradient))
            panel.append(down(x + 22, 178, top - 4, after if in_store else total))
        drawn.append(group(panel, class_="panel", data_name=name))
    return page(640, 416, "Two ways to update: in the store, or on each device",
                f"In both panels cpu(0) pushes its gradient {GRADIENTS[0]} and cpu(1) pushes "
                f"{GRADIENTS[1]}. Left: the store updates the weight, {WEIGHT} - {total} = {after},"
                f" and sends {after} to both devices; each keeps its own gradient. Right: the store"
                f" sends the sum {total} to both; each device computes {WEIGHT} - {total} = {after}"
                f" and holds {total} as its gradient.", drawn)


def draw_owners():
    """Parameters are dealt out by size."""
    owner = largest_first(SIZES, 2)
    by_size = sorted(SIZES, key=SIZES.get, reverse=True)
    bottom = 330
    drawn = [words(280, 32, "Largest first, each to the emptiest device", 22, bold=True),
             words(142, bottom + 28, "four parameters")]
    for place, name in enumerate(SIZES):
        drawn.append(block(42 + 66 * place, bottom, 58, name))
    drawn.append(arrow(284, 200, 336, 200, BLUE, 4))
    for rank in range(2):
        x = 402 + 104 * rank
        low = bottom
        held = []
        for name in by_size:
            if owner[name] == rank:
                held.append(block(x, low, 84, name))
                low -= SCALE * SIZES[name]
        total = sum(SIZES[name] for name in SIZES if owner[name] == rank)
        held.append(line(x - 48, bottom + 2, x + 48, bottom + 2, BLUE, 4))
        held.append(words(x, bottom + 28, f"cpu({rank})", 20, bold=True))
        held.append(words(x, bottom + 54, f"{total} entries"))
        drawn.append(group(held, class_="owner", data_device=rank, data_total=total))
    return page(560, 400, "The largest parameter first, each to the device with the least so far",
                "Four parameters: a with 20 entries, b with 60, c with 8, d with 30. They are dealt"
                " to two devices: cpu(0) owns b, 60 entries, and cpu(1) owns d, a and c, 58 "
                "entries.", drawn)


DRAWINGS = {"owners": draw_owners, "push_pull": draw_push_pull, "two_updates": draw_two_updates}

if __name__ == "__main__":
    write(DRAWINGS)
