"""The drawings of *bfloat16 and scaled losses*: the bits of three formats, and gradients that a
scale moves into the range of float16.

Run it to write two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREY, ORANGE, PALE_GREEN, RED, box, element, line, page, words, write,
)

# Bits: sign, exponent, mantissa. And what is said of each.
FORMATS = {
    "float32": ((1, 8, 23), []),
    "bfloat16": ((1, 8, 7), ["float32's range,", "few digits"]),
    "float16": ((1, 5, 10), ["more digits,", "a small range"]),
}
GRADIENTS = range(-33, -9)  # exponents of two
LOWEST, HIGHEST = -24, 15  # of what float16 holds
SCALES = [0, 12, 27]


def draw_three_formats():
    left, bit, high = 24, 18.5, 34
    drawn = []
    for row, (name, (sizes, says)) in enumerate(FORMATS.items()):
        top = 44 + 112 * row
        drawn.append(words(left, top - 12, name, 20, anchor="start", bold=True))
        x = left
        for part, (size, color) in enumerate(zip(sizes, ["white", ORANGE, BLUE])):
            for _ in range(size):
                drawn.append(box(x, top, bit, high, color, FRAME, class_=f"bit-{name}",
                                 data_part=part))
                x += bit
            if size > 1:
                label = f"exponent: {size}" if part == 1 else f"mantissa: {size}"
                drawn.append(words(x - bit * size / 2, top + high + 22, label))
        for place, text in enumerate(says):
            drawn.append(words(x + 26, top + 12 + 24 * place, text, 20, anchor="start"))
    return page(640, 340, "The bits of three formats",
                "float32: one bit for the sign, 8 for the exponent, 23 for the mantissa. bfloat16: "
                "1, 8 and 7, so float32's range and few digits. float16: 1, 5 and 10, so more "
                "digits and a small range.", drawn)


def power(exponent):
    """Two to the power of `exponent`, as text."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def fate(exponent):
    """What becomes of two to the power of `exponent` in float16."""
    if exponent < LOWEST:
        return "vanishes"
    return "held" if exponent <= HIGHEST else "overflows"


def draw_scaled_range():
    unit = 10.8

    def place(exponent):
        return 22 + unit * (exponent + 34.5)

    begin, end = place(LOWEST - 0.5), place(HIGHEST + 0.5)
    drawn = [words(320, 26, "The right scale keeps all gradients in range", 22, bold=True),
             box(begin, 80, end - begin, 262, PALE_GREEN, "none"),
             words((begin + end) / 2, 68, "what float16 holds", 20, bold=True)]
    for row, scale in enumerate(SCALES):
        y = 144 + 80 * row
        title = "the loss as it is" if scale == 0 else f"the loss times {power(scale)}"
        drawn.append(words((begin + end) / 2, y - 22, title))
        for exponent in GRADIENTS:
            becomes = fate(exponent + scale)
            color = BLUE if becomes == "held" else "white"
            drawn.append(element("circle", cx=place(exponent + scale), cy=y, r=4.6, fill=color,
                                 stroke=BLUE if becomes == "held" else RED, stroke_width=2,
                                 class_=f"scale-{scale}", data_becomes=becomes))
    drawn.append(words(14, 100, "each dot:", anchor="start"))
    drawn.append(words(14, 123, "a gradient", anchor="start"))
    drawn.append(words(place(-29), 174, "vanish", fill=RED, bold=True))
    drawn.append(words(place(14.4), 334, "overflow", fill=RED, bold=True, anchor="start"))
    drawn.append(line(14, 342, 626, 342, GREY, 2))
    for exponent in [LOWEST, 0, HIGHEST]:
        drawn.append(line(place(exponent), 342, place(exponent), 350, GREY, 2))
        drawn.append(words(place(exponent), 370, power(exponent)))
    return page(640, 382, "A scale moves gradients into float16's range",
                "Gradients from 2^-33 to 2^-10 as dots, and the range of float16, 2^-24 to 2^15. "
                "As they are nine vanish. With the loss times 2^12 all are held. With 2^27 two "
                "overflow.", drawn)


DRAWINGS = {"three_formats": draw_three_formats, "scaled_range": draw_scaled_range}

if __name__ == "__main__":
    write(DRAWINGS)
