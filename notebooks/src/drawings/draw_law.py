"""The drawing of chapter 11: the time of a step by a law with three parts, on 1 to 16 devices.

Run it to write the SVG file beside it, the same bytes each time.
"""

from elements import BLUE, GREY, ORANGE, box, group, page, words, write

FIXED, COMPUTE, DEVICE = 2, 32, 1  # units of time: in all, for one device alone, for each device
COUNTS = [1, 2, 4, 8, 16]
UNIT = 12.5  # how wide a unit of time is drawn
LEFT = 138
PARTS = [("fixed", GREY), ("compute", BLUE), ("all-reduce", ORANGE)]


def parts_of_a_step(k):
    """How long each part takes on k devices."""
    all_reduce = 0
    if k > 1:
        all_reduce = DEVICE * k
    return {"fixed": FIXED, "compute": COMPUTE / k, "all-reduce": all_reduce}


def draw_step_law():
    """A bar for each number of devices; its parts one after the other."""
    drawn = [words(312, 34, "Time of a step: compute shrinks, all-reduce grows", 22, bold=True)]
    heights = {"fixed": 46, "compute": 46, "all-reduce": 30}  # tell the parts apart in grey
    for number, k in enumerate(COUNTS):
        y = 62 + 62 * number
        name = "1 device" if k == 1 else f"{k} devices"
        pieces = [words(LEFT - 14, y + 30, name, 20, "end", bold=True)]
        x = LEFT
        for (part, color), length in zip(PARTS, parts_of_a_step(k).values()):
            if length:
                height = heights[part]
                pieces.append(box(x, y + (46 - height) / 2, UNIT * length, height, color, "white",
                                  stroke_width=1.5, class_="part", data_part=part))
            x += UNIT * length
        drawn.append(group(pieces, class_="bar", data_devices=k))
    x = 150
    for part, color in PARTS:
        height = heights[part] / 2
        drawn.append(box(x, 393 - height / 2, 26, height, color))
        drawn.append(words(x + 36, 400, part, 20, "start"))
        x += 150
    return page(624, 420, "The time of a step by a law with three parts",
                "A bar for 1, 2, 4, 8 and 16 devices. The fixed part is the same in all. Compute "
                "halves with each doubling of the devices. All-reduce, which one device doesn't "
                "need, doubles. The bars for 4 and 8 devices are the shortest.", drawn)


DRAWINGS = {"step_law": draw_step_law}

if __name__ == "__main__":
    write(DRAWINGS)
