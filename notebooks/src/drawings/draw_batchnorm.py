"""The drawings of chapter 09: the mean that each device sees; sums that give all the same mean.

Run it to write the SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow, box, element, group, line, page,
    words, write,
)

SHARDS = ((1, 3), (5, 7))  # the batch of four that the chapter works out by hand
LEFT, UNIT = 150, 58  # where 0 stands on a line of values, and how far away 1 is
TOP, STEP, HEIGHT = 62, 132, 116  # of the first row


def place(value):
    """Where a value stands on the line."""
    return LEFT + UNIT * value


def draw_row(row, values, name, color, pale):
    """What one device sees: values on a line, and their mean below it."""
    top = TOP + STEP * row
    middle = top + 44
    mean = sum(values) / len(values)
    drawn = [box(12, top, 616, HEIGHT, pale, color, stroke_width=2, rx=8),
             words(28, middle + 7, name, 20, anchor="start", bold=True),
             line(place(0.5), middle, place(7.5), middle, "black", 2)]
    for value in values:
        drawn.append(element("circle", cx=place(value), cy=middle, r=18, fill="white",
                             stroke=color, stroke_width=4))
        drawn.append(words(place(value), middle + 7, str(value), 20, class_="value"))
    drawn.append(line(place(mean), middle - 24, place(mean), middle + 30, "black", 5,
                      class_="mean", data_mean=mean))
    side = {1: "start", 0: "middle", -1: "end"}[(mean > 4) - (mean < 4)]
    drawn.append(words(place(mean), top + 100, f"mean {mean:g}", 20, anchor=side, bold=True))
    return group(drawn, class_="batch", data_name=name)


def draw_shift(row, mean, whole):
    """How far a shard's mean lies from the whole batch's."""
    y = TOP + STEP * row + 68
    middle = (place(mean) + place(whole)) / 2
    return group([arrow(place(whole), y, place(mean), y, "black", 4),
                  words(middle, y + 31, f"{mean - whole:+g}".replace("-", "−"), 20, bold=True)],
                 class_="shift", data_row=row, data_shift=mean - whole)


def draw_shards_and_means():
    """One device sees the whole batch; each of two sees a shard, with a mean of its own."""
    batch = SHARDS[0] + SHARDS[1]
    whole = sum(batch) / len(batch)
    drawn = [words(320, 38, "Each device takes the mean of its own shard", 24, bold=True),
             draw_row(0, batch, "one device", FRAME, PALE_GREY),
             draw_row(1, SHARDS[0], "device 0", BLUE, PALE_BLUE),
             draw_row(2, SHARDS[1], "device 1", ORANGE, PALE_ORANGE),
             line(place(whole), TOP + HEIGHT, place(whole), TOP + 2 * STEP + HEIGHT - 8, "black", 2,
                  stroke_dasharray="5 5")]
    for row, shard in enumerate(SHARDS, 1):
        drawn.append(draw_shift(row, sum(shard) / len(shard), whole))
    return page(640, 452, "Each device takes the mean of its own shard",
                "One device sees a batch of four numbers, 1, 3, 5 and 7, whose mean is 4. Of two "
                "devices, device 0 sees 1 and 3 with the mean 2, which is 2 less than 4, and "
                "device 1 sees 5 and 7 with the mean 6, which is 2 more.", drawn)


def draw_sums_of_all():
    """Both devices' sums and sums of squares, the totals, and the statistics that follow."""
    totals = [sum(sum(shard) for shard in SHARDS), sum(v * v for shard in SHARDS for v in shard)]
    mean = totals[0] / 4
    variance = totals[1] / 4 - mean**2
    title = "Add up the sums, then find mean and variance"
    drawn = [words(320, 32, title, 22, bold=True), words(348, 212, "all-reduce", 20, "start", True)]
    for column, text in ((92, "shard"), (228, "its sums"), (420, "totals"), (560, "statistics")):
        drawn.append(words(column, 66, text))
    for rank, shard in enumerate(SHARDS):
        top = 78 + 140 * rank
        color, pale = ((BLUE, PALE_BLUE), (ORANGE, PALE_ORANGE))[rank]
        drawn.append(box(10, top, 620, 112, pale, color, stroke_width=2, rx=8))
        drawn.append(words(24, top + 30, f"device {rank}", 20, anchor="start", bold=True))
        drawn.append(words(92, top + 74, f"{shard[0]}, {shard[1]}", 24, class_="shard"))
        cells = [(f"Σx = {sum(shard)}", f"Σx = {totals[0]}", f"mean {mean:g}"),
                 (f"Σx² = {sum(v * v for v in shard)}", f"Σx² = {totals[1]}",
                  f"variance {variance:g}")]
        for number, (own, total, statistic) in enumerate(cells):
            y = top + 48 + 36 * number
            drawn.append(words(228, y, own, 22, class_="own"))
            drawn.append(words(420, y, total, 22, bold=True, class_="total"))
            drawn.append(words(560, y, statistic, 22, bold=True, class_="statistic"))
        drawn.append(arrow(136, top + 62, 166, top + 62, FRAME, 3))
        drawn.append(arrow(474, top + 62, 500, top + 62, FRAME, 3))
    for start, other in ((140, 280), (280, 140)):
        drawn.append(arrow(290, start, 362, start, "black", 4))
        drawn.append(arrow(290, start, 362, other + (14 if other < start else -14), "black", 4))
    return page(640, 342, title,
                "Device 0 has 1 and 3, whose sum is 4 and whose sum of squares is 10. Device 1 has "
                "5 and 7, with the sums 12 and 74. An all-reduce gives both devices the totals 16 "
                "and 84, from which both find the mean 4 and the variance 5.", drawn)


DRAWINGS = {"shards_and_means": draw_shards_and_means, "sums_of_all": draw_sums_of_all}

if __name__ == "__main__":
    write(DRAWINGS)
