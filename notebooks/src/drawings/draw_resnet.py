"""The drawings of chapter 08 and of its deeper notebook: shapes in ResNet-18, and two scalings.

Run it to write three SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow, box, element, group, line, page, words,
    write,
)

# What leaves each part of the network: its name, channels, and pixels a side.
STAGES = [("image", 1, 28), ("stage 1", 64, 28), ("stage 2", 128, 14), ("stage 3", 256, 7),
          ("stage 4", 512, 4), ("scores", 10, 1)]
SHEETS = {1: 1, 64: 2, 128: 3, 256: 5, 512: 8}  # how many are drawn for so many channels


def draw_resnet_stages():
    """Each stage after the first halves the side and doubles the channels."""
    drawn = [words(312, 34, "Stage by stage smaller images, and more channels", 22, bold=True)]
    centres = [52, 160, 270, 374, 474, 582]
    base = 186  # where all squares stand
    for (name, channels, pixels), x in zip(STAGES, centres):
        side = 3.1 * pixels
        pieces = []
        if name == "scores":
            for score in range(10):
                fill = ORANGE if score == 7 else "white"
                pieces.append(box(x - 9, base - 11 * (10 - score), 18, 11, fill, "black",
                                  stroke_width=1.5))
        else:
            for sheet in reversed(range(SHEETS[channels])):
                left = x - side / 2 - 2.5 * (SHEETS[channels] - 1) + 5 * sheet
                fill = PALE_GREY if name == "image" else PALE_BLUE
                pieces.append(box(left, base - side - 5 * sheet, side, side, fill, "black",
                                  stroke_width=1.5))
        pieces.append(words(x, base + 34, name, 18, bold=True))
        if name == "scores":
            pieces.append(words(x, base + 60, "10"))
        else:
            pieces.append(words(x, base + 60, f"{pixels} × {pixels}", class_="pixels"))
            pieces.append(words(x, base + 84, f"× {channels}", class_="channels"))
        drawn.append(group(pieces, class_="stage", data_name=name))
    steps = ["convolution", "2 blocks", "2 blocks", "2 blocks", "mean"]
    for left, right, step in zip(centres, centres[1:], steps):
        drawn.append(arrow(left + 12, base + 118, right - 12, base + 118, "black", 3))
        if step != "convolution":
            drawn.append(words((left + right) / 2, base + 144, step, 17))
    drawn.append(words((centres[0] + centres[1]) / 2, base + 144, "convolution,", 17))
    drawn.append(words((centres[0] + centres[1]) / 2, base + 164, "2 blocks", 17))
    drawn.append(words((centres[4] + centres[5]) / 2, base + 164, "and dense", 17))
    return page(624, 364, "What leaves each stage of ResNet-18, for images of 28 by 28",
                "One image of 28 by 28. A convolution and stage 1 give 64 channels of 28 by 28; "
                "stage 2 gives 128 of 14 by 14, stage 3 256 of 7 by 7, stage 4 512 of 4 by 4. "
                "Their means and a dense layer give ten scores.", drawn)


def layer_box(x, y, text, fill, width=190):
    """A layer: a box with its name."""
    return group([box(x - width / 2, y, width, 40, fill, "black", stroke_width=2, rx=6),
                  words(x, y + 27, text, 18)], class_="layer", data_name=text)


def draw_residual_block():
    """The first block of stage 2: the change on the left, the input beside it on the right."""
    left, right = 190, 450
    drawn = [words(312, 34, "A block adds a change to its input", 22, bold=True)]
    drawn.append(box(255, 60, 110, 40, "white", "black", stroke_width=2, rx=20))
    drawn.append(words(310, 87, "input x", 18, bold=True))
    drawn.append(words(380, 86, "64 × 28 × 28", 17, "start", class_="shape", data_of="input"))
    # The change.
    layers = [("conv 3×3, stride 2", PALE_BLUE), ("norm", PALE_GREY), ("ReLU", PALE_GREY),
              ("conv 3×3", PALE_BLUE), ("norm", PALE_GREY)]
    drawn.append(line(255, 80, left, 80, width=3))
    drawn.append(arrow(left, 80, left, 128, "black", 3))
    y = 128
    for number, (text, fill) in enumerate(layers):
        drawn.append(layer_box(left, y, text, fill))
        if number < len(layers) - 1:
            drawn.append(arrow(left, y + 40, left, y + 60, "black", 3))
        y += 60
    drawn.append(words(left - 110, 274, "change", 18, "end", bold=True, fill=BLUE))
    for x1, y1, x2, y2 in [(84, 128, 84, 408), (84, 128, 91, 128), (84, 408, 91, 408)]:
        drawn.append(line(x1, y1, x2, y2, BLUE, width=3))
    # Beside it.
    drawn.append(line(310, 100, 310, 114, width=3))
    drawn.append(line(310, 114, right, 114, width=3))
    drawn.append(arrow(right, 114, right, 188, "black", 3))
    drawn.append(layer_box(right, 188, "conv 1×1, stride 2", PALE_ORANGE))
    drawn.append(words(right + 12, 254, "only where", 17, "start"))
    drawn.append(words(right + 12, 276, "shapes differ", 17, "start"))
    # The sum.
    drawn.append(line(right, 228, right, 468, width=3))
    drawn.append(arrow(right, 468, 332, 468, "black", 3))
    drawn.append(line(left, 408, left, 468, width=3))
    drawn.append(arrow(left, 468, 288, 468, "black", 3))
    drawn.append(element("circle", cx=310, cy=468, r=22, fill="white", stroke="black",
                         stroke_width=3))
    drawn.append(words(310, 478, "+", 30, bold=True))
    drawn.append(words(left + 8, 440, "128 × 14 × 14", 17, "start", class_="shape",
                       data_of="change"))
    drawn.append(words(right - 8, 440, "128 × 14 × 14", 17, "end", class_="shape",
                       data_of="beside"))
    drawn.append(arrow(310, 490, 310, 518, "black", 3))
    drawn.append(layer_box(310, 518, "ReLU", PALE_GREY, 110))
    drawn.append(arrow(310, 558, 310, 588, "black", 3))
    drawn.append(words(324, 584, "128 × 14 × 14", 17, "start", class_="shape", data_of="output"))
    return page(624, 604, "A residual block, with the shapes of the first block of stage 2",
                "The input, 64 channels of 28 by 28, goes two ways. On the left it becomes the "
                "change: convolution with stride 2, norm, ReLU, convolution, norm. On the right a "
                "1 by 1 convolution with stride 2 gives it the same shape, 128 channels of 14 by "
                "14. Both are added, and ReLU follows.", drawn)


def draw_two_scalings():
    """Deeper: what a second device is used for; a square is two images."""
    drawn = [words(312, 34, "Two devices: the same batch, or twice the batch", 22, bold=True)]
    rows = [("one device", [16], "batch 32"), ("strong", [8, 8], "batch 32"),
            ("weak", [16, 16], "batch 64")]
    for number, (name, shards, batch) in enumerate(rows):
        y = 66 + 92 * number
        pieces = [words(14, y + 38, name, 20, "start", bold=True)]
        for device, squares in enumerate(shards):
            x = 136 + 190 * device
            fill = [BLUE, ORANGE][device]
            pieces.append(box(x, y, 178, 64, PALE_GREY, "black", stroke_width=2, rx=6))
            for square in range(squares):
                pieces.append(box(x + 9 + 20 * (square % 8), y + 10 + 24 * (square // 8), 18, 18,
                                  fill, "black", class_="images", data_device=device))
        pieces.append(words(524, y + 38, batch, 20, "start"))
        drawn.append(group(pieces, class_="row", data_name=name))
    drawn.append(words(225, 354, "device 0"))
    drawn.append(words(415, 354, "device 1"))
    drawn.append(box(500, 340, 18, 18, "white", "black"))
    drawn.append(words(526, 354, "2 images", anchor="start"))
    return page(624, 372, "Strong and weak scaling on two devices",
                "One device takes a batch of 32 images. Strong: two devices take 16 each, a batch "
                "of 32. Weak: two devices take 32 each, a batch of 64.", drawn)


DRAWINGS = {"resnet_stages": draw_resnet_stages, "residual_block": draw_residual_block,
            "two_scalings": draw_two_scalings}

if __name__ == "__main__":
    write(DRAWINGS)
