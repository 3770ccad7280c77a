"""The first drawing of the course: how two devices train one network.

Run it to write an SVG file beside it, the same bytes each time.
"""

from draw_splitting import draw_image
from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_ORANGE, arrow, box, element,
    group, line, page, words, write,
)

LETTERS = 24  # units: about 10 pixels where a drawing 900 wide is shown 390 pixels wide
IMAGES = 8
# Of each device: its colours, the top of its lane, and in that of its name and of the rest.
LANES = ((BLUE, PALE_BLUE, 16, 32, 44), (ORANGE, PALE_ORANGE, 264, 136, 16))


def draw_network(x, y, fill):
    """A small network of three layers, 100 wide and 84 high; `fill` stands for its weights."""
    layers = []
    for column, size in enumerate((2, 3, 2)):
        layers.append([(x + 12 + 38 * column, y + 42 + 30 * (node - (size - 1) / 2))
                       for node in range(size)])
    drawn = []
    for layer, following in zip(layers, layers[1:]):
        for start in layer:
            for end in following:
                drawn.append(line(*start, *end, FRAME, 2))
    for layer in layers:
        for node_x, node_y in layer:
            drawn.append(element("circle", cx=node_x, cy=node_y, r=10, fill=fill, stroke="black",
                                 stroke_width=2))
    return group(drawn, class_="network")


def draw_device(device, images):
    """What one device does, from left to right; between gradient and update is room for the sum."""
    color, pale, top, name, content = LANES[device]
    middle = top + content + 45
    drawn = [arrow(88, middle, 140, middle, color, 5),
             box(146, top, 744, 150, pale, color, stroke_width=3, rx=12),
             words(162, top + name, f"device {device}", LETTERS, "start", bold=True)]
    for place, image in enumerate(images):
        drawn.append(draw_image(164 + 48 * (place % 2), top + content + 48 * (place // 2), 42,
                                image))
    drawn += [arrow(264, middle, 302, middle, color, 5),
              draw_network(312, middle - 42, "white"),
              arrow(418, middle, 456, middle, color, 5),
              box(462, middle - 28, 128, 56, "white", color, stroke_width=3, rx=6),
              words(526, middle + 8, "gradient", LETTERS),
              draw_network(762, middle - 42, GREEN)]
    return group(drawn)


def draw_idea():
    """From one batch over two gradients and one sum to two equal networks."""
    half = IMAGES // 2
    drawn = [words(50, 36, "batch", LETTERS, bold=True),
             box(22, 50, 56, 364, "none", GREY, stroke_width=2, rx=6)]
    for image in range(IMAGES):
        drawn.append(draw_image(31, 58 + 44 * image + 4 * (image >= half), 36, image))
    drawn.append(line(6, 232, 94, 232, "black", 4, stroke_dasharray="9 5"))
    for device in range(2):
        drawn.append(draw_device(device, range(half * device, half * device + half)))
    drawn += [words(362, 223, "same network", LETTERS), words(812, 223, "same update", LETTERS),
              arrow(544, 136, 582, 175, GREEN, 7), arrow(544, 294, 582, 255, GREEN, 7),
              arrow(676, 177, 750, 116, GREEN, 7), arrow(676, 253, 750, 314, GREEN, 7),
              box(540, 178, 174, 74, PALE_GREEN, GREEN, stroke_width=4, rx=10),
              words(627, 209, "sum", 28, bold=True), words(627, 239, "all-reduce", LETTERS)]
    return page(900, 430, "One batch, two devices, one sum of gradients",
                "From left to right. A batch of eight images is cut in two. Device 0 gets the "
                "first half, device 1 the second. Both hold the same network and compute a "
                "gradient from their half. Arrows lead from both gradients to one sum, by an "
                "all-reduce, and from the sum back to both devices, which make the same update: "
                "both networks stay equal.", drawn)


DRAWINGS = {"idea": draw_idea}

if __name__ == "__main__":
    write(DRAWINGS)
