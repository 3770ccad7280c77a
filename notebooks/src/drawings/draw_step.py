"""The drawing of chapter 04: a training step on two devices.

Run it to write the SVG file beside it, the same bytes each time.
"""

from elements import (
    BLUE, DARK_GREEN, GREEN, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, arrow, box,
    group, page, words, write,
)

PARTS = ("1 shards", "2 gradients", "3 sum", "4 update")


def draw_stage(x, y, lines, fill, stroke, **attributes):
    """A box with what a device holds, in one or two lines."""
    drawn = [box(x - 105, y, 210, 58, fill, stroke, stroke_width=2, rx=8)]
    first = y + 37 if len(lines) == 1 else y + 25
    for number, text in enumerate(lines):
        drawn.append(words(x, first + 23 * number, text))
    return group(drawn, **attributes)


def draw_lenet_step():
    """Shards go out, gradients are summed, and both devices make the same update."""
    columns = (232, 500)
    top, step = 178, 112
    drawn = [words(320, 34, "Only the all-reduce joins the two devices", 22, bold=True),
             box(241, 54, 250, 46, PALE_GREY, "black", stroke_width=2, rx=8),
             words(366, 84, "host: a batch of n images")]
    for device, (x, color, pale) in enumerate(zip(columns, (BLUE, ORANGE),
                                                  (PALE_BLUE, PALE_ORANGE))):
        drawn.append(words(x + (-1, 1)[device] * 52, 160, f"device {device}", 20, bold=True))
        drawn.append(arrow(366 + (-1, 1)[device] * 60, 104, x, top - 6, GREEN, 4,
                           class_="exchange", data_row=0))
        texts = ((f"shard {device}",), ("gradient of", f"shard {device}'s loss"),
                 ("sum of both", "gradients"), ("weights −", "(rate / n) × sum"))
        for row, lines in enumerate(texts):
            y = top + step * row
            fill = PALE_GREEN if row == 2 else pale
            drawn.append(draw_stage(x, y, lines, fill, GREEN if row == 2 else color,
                                    class_="stage", data_device=device, data_row=row))
            if row in (1, 3):
                drawn.append(arrow(x, y - step + 60, x, y - 4, "black", 3))
        y = top + step * 2
        for origin in range(2):  # both gradients go into each sum
            begin = columns[origin] + (20 if origin < device else -20 if origin > device else 0)
            drawn.append(arrow(begin, y - step + 60, x + (begin - columns[origin]) * -1, y - 4,
                               GREEN, 4, class_="exchange", data_row=2, data_sender=origin,
                               data_receiver=device))
    for row, part in enumerate(PARTS):
        drawn.append(words(8, top + step * row + 37, part, 19, anchor="start", bold=True))
    drawn.append(words(30, top + step * 2 - 20, "all-reduce", anchor="start", bold=True,
                       fill=DARK_GREEN))
    return page(640, 590, "One training step on two devices: shards, gradients, sum, update",
                "The host cuts a batch and sends a shard to each of two devices. Each computes the "
                "gradient of its shard's loss. Arrows marked all-reduce lead from both gradients "
                "to the sum on each device. Each subtracts rate over n times the sum from its "
                "weights.", drawn)


DRAWINGS = {"lenet_step": draw_lenet_step}

if __name__ == "__main__":
    write(DRAWINGS)
