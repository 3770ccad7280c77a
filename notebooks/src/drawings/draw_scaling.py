"""The drawing of chapter 11: the time of a step on 1 to 8 devices, in strong and weak scaling.

Run it to write the SVG file beside it, the same bytes each time.
"""

from elements import BLUE, ORANGE, box, group, page, words, write

IMAGES, WHOLE = 32, 4  # ms: computing the batch on one device; sending all gradients once
COUNTS = [1, 2, 4, 8]
UNIT = 9.4  # how wide a millisecond is drawn
LEFT = 138


def parts_of_a_step(k, scaling):
    """Milliseconds of computing and of communication, as chapter 11's first cell has them."""
    computing = IMAGES / k if scaling == "strong" else IMAGES
    return computing, 2 * WHOLE * (k - 1) / k


def draw_strong_and_weak():
    """A bar for each number of devices, its two parts one after the other; once for each way."""
    drawn = []
    headings = {"strong": "Strong scaling: the same 32 images for all",
                "weak": "Weak scaling: 32 images for each device"}
    for panel, (scaling, heading) in enumerate(headings.items()):
        top = 30 + 222 * panel
        drawn.append(words(14, top, heading, 21, "start", bold=True))
        for number, k in enumerate(COUNTS):
            y = top + 16 + 44 * number
            name = "1 device" if k == 1 else f"{k} devices"
            pieces = [words(LEFT - 14, y + 25, name, 20, "end")]
            x = LEFT
            looks = [(BLUE, 36), (ORANGE, 20)]  # the height tells the parts apart in grey
            parts = parts_of_a_step(k, scaling)
            for (color, height), length in zip(looks, parts):
                if length:
                    pieces.append(box(x, y + (36 - height) / 2, UNIT * length, height, color,
                                      "white", stroke_width=1.5, class_="part"))
                x += UNIT * length
            pieces.append(words(x + 10, y + 25, f"{sum(parts):g} ms", 19, "start",
                                class_="total"))
            drawn.append(group(pieces, class_="bar", data_devices=k, data_scaling=scaling))
    legend = [(138, "computing", BLUE, 26), (318, "communication", ORANGE, 15)]
    for x, text, color, height in legend:
        drawn.append(box(x, 470 - height / 2, 26, height, color))
        drawn.append(words(x + 36, 476, text, 20, "start"))
    return page(624, 494, "The time of a step in strong and in weak scaling",
                "Bars for 1, 2, 4 and 8 devices. In strong scaling computing halves from bar to "
                "bar and communication grows from 0 to 7 milliseconds: 32, 20, 14 and 11 "
                "milliseconds together. In weak scaling computing stays at 32: together 32, 36, "
                "38 and 39.", drawn)


DRAWINGS = {"strong_and_weak": draw_strong_and_weak}

if __name__ == "__main__":
    write(DRAWINGS)
