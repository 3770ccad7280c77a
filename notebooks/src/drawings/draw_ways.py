"""The drawings of *Seven ways, computed*: four ways to cut, ring attention, and experts.

Run it to write three SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, ORANGE, PALE_BLUE, PALE_ORANGE, arrow, box, group,
    page, words, write,
)

# ---- Four ways to cut ----

SIDE = 112  # of a square
PARTS = 4
WAYS = {  # name: what is cut, in which direction, and what each device has whole
    "data": ("batch", "rows", ("all", "weights")),
    "context": ("batch", "columns", ("all", "weights")),
    "pipeline": ("weights", "rows", ("the whole", "batch")),
    "tensor": ("weights", "columns", ("the whole", "batch")),
}
AXES = {"batch": ("sequences", "tokens"), "weights": ("layers", "width")}  # down, to the right


def square(x, y, direction, of):
    """A table that is cut for four devices; `direction` is "rows" or "columns"."""
    drawn = []
    band = SIDE / PARTS
    for device in range(PARTS):
        color = BLUE if device == 0 else PALE_BLUE
        ink = "white" if device == 0 else "black"
        if direction == "rows":
            drawn.append(box(x, y + band * device, SIDE, band, color, FRAME, class_="part"))
            drawn.append(words(x + SIDE / 2, y + band * device + 21, f"device {device}",
                               fill=ink))
        else:
            drawn.append(box(x + band * device, y, band, SIDE, color, FRAME, class_="part"))
            place = x + band * (device + 0.5) + 6
            drawn.append(words(place, y + SIDE / 2, f"device {device}", fill=ink,
                               transform=f"rotate(-90 {place:g} {y + SIDE / 2:g})"))
    down, right = AXES[of]
    drawn.append(words(x - 8, y + 70, f"{down} ↓", anchor="end"))
    drawn.append(words(x + SIDE / 2, y - 8, f"{right} →"))
    return group(drawn, class_="square", data_of=of)


def draw_four_cuts():
    drawn = [words(320, 26, "Two ways cut the batch, and two the weights", 22, bold=True)]
    for place, (way, (cut, direction, whole)) in enumerate(WAYS.items()):
        x = 4 + 322 * (place % 2)
        y = 104 + 188 * (place // 2)
        inside = [words(x, y - 34, f"{way}: cut the {cut}", 20, bold=True, anchor="start"),
                  square(x + 108, y, direction, cut)]
        for row, text in enumerate(("each has", *whole)):
            inside.append(words(x + 108 + SIDE + 8, y + 40 + 24 * row, text, anchor="start"))
        drawn.append(group(inside, class_="way", data_way=way))
    return page(640, 416, "The batch can be cut in two directions, and the weights in two",
                "Four panels, each with a square that is cut for four devices. Data: the batch is "
                "cut between sequences, each device has all weights. Context: the batch is cut "
                "between tokens. Pipeline: the weights are cut between layers, each device has "
                "the whole batch. Tensor: the weights are cut across the width.", drawn)


# ---- Ring attention ----


def draw_ring_attention():
    drawn = []
    width, height, gap = 128, 150, 34
    for device in range(PARTS):
        x = 13 + (width + gap) * device
        first = 2 * device
        drawn.append(box(x, 44, width, height, "white", FRAME, rx=8))
        drawn.append(words(x + width / 2, 34, f"device {device}", 20, bold=True))
        drawn.append(box(x + 10, 58, width - 20, 50, PALE_BLUE, BLUE))
        drawn.append(words(x + width / 2, 79, "queries"))
        drawn.append(words(x + width / 2, 99, f"tokens {first}, {first + 1}", class_="stays"))
        drawn.append(box(x + 10, 124, width - 20, 56, PALE_ORANGE, ORANGE, stroke_width=3))
        drawn.append(words(x + width / 2, 147, "keys, values"))
        drawn.append(words(x + width / 2, 169, f"{first}, {first + 1}", class_="moves"))
    for device in range(PARTS - 1):
        x = 13 + (width + gap) * device + width
        drawn.append(arrow(x - 9, 152, x + gap + 9, 152, "black", 4))
    right = 13 + (width + gap) * 3 + width / 2
    left = 13 + width / 2
    drawn.append(f'<path d="M {right} 182 V 222 H {left} V 202" fill="none" stroke="black" '
                 'stroke-width="4"/>')
    drawn.append(arrow(left, 206, left, 184, "black", 4))
    drawn.append(words(320, 250, "queries stay; keys and values go round the ring"))
    return page(640, 264, "Keys and values go round a ring of devices",
                "Four devices in a row. Each has the queries of two tokens, which stay, and their "
                "keys and values, which go by arrows to the next device, and from the last to the "
                "first.", drawn)


# ---- Experts ----

CHOICE = [[0, 1, 0, 1, 1, 1], [1, 1, 0, 1, 0, 0]]  # the expert of each token, by device
COLORS = [BLUE, ORANGE]


def draw_experts():
    drawn = [words(320, 26, "Each token goes to the expert that the router chose", 22, bold=True)]
    token_x = 46
    for device in range(2):
        y = 72 + 190 * device
        drawn.append(box(4, y, 632, 160, "none", FRAME, rx=8))
        drawn.append(words(20, y - 10, f"device {device}", 20, bold=True, anchor="start"))
        drawn.append(words(token_x + 60, y + 28, "tokens"))
        drawn.append(box(440, y + 46, 170, 68, COLORS[device], FRAME, rx=8))
        ink = "white" if device == 0 else "black"
        drawn.append(words(525, y + 87, f"expert {device}", 20, fill=ink, bold=True))
    for device, chosen in enumerate(CHOICE):
        for number, expert in enumerate(chosen):
            x = token_x + 44 * (number % 3)
            y = 72 + 190 * device + 46 + 48 * (number // 3)
            drawn.append(box(x, y, 32, 32, COLORS[expert], FRAME, class_="token",
                             data_device=device, data_expert=expert))
            ink = "white" if expert == 0 else "black"
            drawn.append(words(x + 16, y + 23, str(expert), fill=ink))
    for device in range(2):
        here = 72 + 190 * device + 80
        there = 72 + 190 * (1 - device) + 80
        drawn.append(arrow(190, here, 432, here, COLORS[device], 7))
        shift = 26 if device == 0 else -26
        color = COLORS[1 - device]
        drawn.append(arrow(190, here + shift, 432, there - shift, color, 7))
    drawn.append(words(320, 450, "results come back on the same ways"))
    return page(640, 464, "Tokens travel to their experts",
                "Two devices, one below the other. Each has six tokens and one expert. Arrows lead "
                "from each device's tokens to both experts.", drawn)


DRAWINGS = {"four_cuts": draw_four_cuts, "ring_attention": draw_ring_attention,
            "experts": draw_experts}

if __name__ == "__main__":
    write(DRAWINGS)
