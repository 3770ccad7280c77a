"""The drawings of chapter 02: how a batch is cut, and two mistakes that raise no error.

Run it to write three SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, RED, arrow, box, group,
    line, page, words, write,
)

DEVICES = 3

DIGITS = (  # 3 by 5 pixels each
    "111 101 101 101 111", "010 110 010 010 111", "111 001 111 100 111", "111 001 111 001 111",
    "101 101 111 001 001", "111 100 111 001 111", "111 100 111 101 111", "111 001 001 001 001",
    "111 101 111 101 111", "111 101 111 001 111")


def draw_image(x, y, size, digit):
    """A small picture of a handwritten digit, white on black."""
    pixel = size / 7
    drawn = [box(x, y, size, size, "#222222", "none")]
    for row, pixels in enumerate(DIGITS[digit].split()):
        for column, lit in enumerate(pixels):
            if lit == "1":
                drawn.append(box(x + (column + 2) * pixel, y + (row + 1) * pixel,
                                 pixel, pixel, "white", "white", stroke_width=0.5))
    return group(drawn)


def draw_row(x, y, digit):
    """A row of a batch: an image and its label."""
    label = [box(x + 50, y, 36, 36, PALE_ORANGE, ORANGE), words(x + 68, y + 25, str(digit), 20)]
    return group([draw_image(x, y, 36, digit), *label], class_="row", data_row=digit)


def draw_batch_to_shards():
    """Chapter 02: how a batch is cut."""
    cuts = [0, 4, 7, 10]
    step, gap, top = 44, 26, 104
    drawn = [words(280, 32, "Ten rows, three devices: 4, 3 and 3", 22, bold=True),
             words(113, 110, "one batch"), words(418, 80, "three shards")]
    middle = top + gap  # the batch stands as far down as the middle shard
    drawn.append(box(58, middle - 10, 110, 10 * step + 14, "none", GREY))
    for digit in range(10):
        drawn.append(draw_row(70, middle + step * digit, digit))
    for device in range(3):
        first, stop = cuts[device], cuts[device + 1]
        y = top + step * first + gap * device
        height = step * (stop - first) - 6
        if device > 0:
            cut = middle + step * first - 3
            drawn.append(line(28, cut, 190, cut, "black", 3, stroke_dasharray="8 5"))
            drawn.append(words(22, cut + 6, str(first), anchor="end", bold=True))
        batch_y = middle + step * (first + stop) / 2 - 3
        drawn.append(arrow(200, batch_y, 300, y + height / 2, BLUE, 4))
        shard = [box(308, y - 8, 220, height + 16, PALE_BLUE, BLUE, stroke_width=2, rx=6),
                 words(470, y + height / 2 + 7, f"cpu({device})", 20, bold=True)]
        for digit in range(first, stop):
            shard.append(draw_row(320, y + step * (digit - first), digit))
        drawn.append(group(shard, class_="shard", data_device=device))
    return page(560, 612, "A batch of ten rows is cut into three shards",
                "A column of ten images with their labels, 0 to 9, is cut after the fourth and "
                "after the seventh. Arrows lead to three devices: cpu(0) holds rows 0 to 3, cpu(1) "
                "rows 4 to 6, cpu(2) rows 7 to 9, each image with its label.", drawn)


def cut_into_blocks(examples):
    """Shards of consecutive examples, the first ones longer by one where they don't divide."""
    size, longer = divmod(len(examples), DEVICES)
    shards, begin = [], 0
    for device in range(DEVICES):
        end = begin + size + (device < longer)
        shards.append(examples[begin:end])
        begin = end
    return shards


def deal(examples):
    """One example to each device in turn."""
    return [examples[device::DEVICES] for device in range(DEVICES)]


def draw_pair(x, y, image, label):
    """An image, a line, and the label that it gets; the line says whether it is its own."""
    middle = y + 24
    own = image == label
    color = GREEN if own else RED
    drawn = [draw_image(x, y, 48, image), line(x + 48, middle, x + 108, middle, color, 5),
             box(x + 108, y, 48, 48, "white", color, stroke_width=4),
             words(x + 132, y + 33, str(label), 26, bold=True)]
    if not own:
        for slope in (-1, 1):
            drawn.append(line(x + 68, middle - 10 * slope, x + 88, middle + 10 * slope, RED, 5))
    return group(drawn, class_="pair", data_image=image, data_label=label,
                 data_wrong="no" if own else "yes")


def draw_labels_dealt():
    """Images cut into blocks and labels dealt, so that nearly none belong together."""
    images, labels = cut_into_blocks(range(10)), deal(range(10))
    wrong = 0
    drawn = []
    for device in range(DEVICES):
        x = 14 + 208 * device
        drawn.append(box(x, 88, 196, 268, PALE_BLUE, BLUE, stroke_width=2, rx=8))
        drawn.append(words(x + 98, 116, f"cpu({device})", 20, bold=True))
        for row, (image, label) in enumerate(zip(images[device], labels[device])):
            wrong += image != label
            drawn.append(draw_pair(x + 20, 130 + 55 * row, image, label))
    drawn += [words(320, 32, f"{wrong} of 10 images get another image's label", 22, bold=True),
              words(320, 66, "images are cut into blocks, but labels are dealt like cards")]
    return page(640, 370, f"{wrong} of 10 images get another image's label",
                "Three devices. Images 0 to 3 are on cpu(0), 4 to 6 on cpu(1), 7 to 9 on cpu(2). "
                "Labels are dealt: 0, 3, 6 and 9 to cpu(0), 1, 4 and 7 to cpu(1), 2, 5 and 8 to "
                "cpu(2). Only image 0 has its own label; the lines from all other images to their "
                "labels are crossed out.", drawn)


STEPS = (((1, 2), (3, 4), (5, 6)), ((1,), (2,), ()))  # the examples of each device in two steps


def gradients_after(steps):
    """Of the weight w on each device, with the loss w x: without examples the old one stays."""
    gradients = [0] * DEVICES
    for shards in steps:
        for device, shard in enumerate(shards):
            if shard:
                gradients[device] = sum(shard)
    return gradients


def draw_gradient(x, y, value, old):
    """A gradient in a box whose top is at `y`; an old one is grey."""
    fill, stroke, ink = (PALE_GREY, GREY, FRAME) if old else ("white", BLUE, "black")
    return group([box(x, y, 84, 48, fill, stroke, stroke_width=3, rx=6),
                  words(x + 42, y + 32, str(value), 24, bold=True, fill=ink)],
                 class_="gradient", data_value=value, data_old="yes" if old else "no")


def draw_sum(x, gradients, shards):
    """The sum of all gradients and, if that is wrong, what it should be."""
    total = sum(gradients)
    parts = [sum(shard) for shard in shards if shard]
    right = sum(parts)
    color = "black" if total == right else RED
    text = " + ".join(str(value) for value in gradients) + f" = {total}"
    drawn = [box(x - 105, 318, 210, 48, "white", color, stroke_width=3, rx=6),
             words(x, 350, text, 22, bold=True, fill=color)]
    if total != right:
        addends = " + ".join(str(part) for part in parts)
        drawn.append(words(x, 394, f"right: {addends} = {right}", 20, bold=True))
    return group(drawn, class_="sum", data_value=total, data_right=right)


def draw_device_without_data():
    """A device that gets no examples in a step, and whose old gradient is added again."""
    title = "No data for cpu(2) in step 2, but a gradient: the old one"
    drawn = [words(320, 32, title, 22, bold=True), words(8, 349, "sum", 20, "start", bold=True)]
    for device in range(DEVICES):
        drawn.append(words(8, 151 + 64 * device, f"cpu({device})", 20, "start", bold=True))
    for number, left in enumerate((112, 396)):
        gradients = gradients_after(STEPS[:number + 1])
        step = [words(left + 112, 74, f"step {number + 1}", 20, bold=True),
                words(left + 42, 106, "examples"), words(left + 182, 106, "gradient")]
        for device, shard in enumerate(STEPS[number]):
            y = 120 + 64 * device
            if shard:
                step.append(box(left, y, 84, 48, PALE_BLUE, BLUE, stroke_width=2, rx=6))
                step.append(words(left + 42, y + 31, ", ".join(map(str, shard)), 20))
                step.append(arrow(left + 88, y + 24, left + 136, y + 24, BLUE, 4))
            else:  # the arrow comes from the gradient of the step before
                step.append(arrow(left - 56, y + 24, left + 136, y + 24, GREY, 4, dashed=True))
                step.append(words(left + 42, y + 14, "no data", 20, bold=True, fill=RED))
            step.append(draw_gradient(left + 140, y, gradients[device], old=not shard))
        step.append(draw_sum(left + 112, gradients, STEPS[number]))
        drawn.append(group(step, class_="step"))
    return page(640, 410, title,
                "Step 1: the devices have the examples 1 and 2, 3 and 4, 5 and 6; their gradients "
                "3, 7 and 11 add up to 21. Step 2: cpu(0) has the example 1 and the gradient 1, "
                "cpu(1) has 2 and 2. cpu(2) has no data, and a dashed arrow leads from its "
                "gradient of step 1, 11, to the same 11, grey. The sum is 14; it should be 3.",
                drawn)


DRAWINGS = {"batch_to_shards": draw_batch_to_shards, "labels_dealt": draw_labels_dealt,
            "device_without_data": draw_device_without_data}

if __name__ == "__main__":
    write(DRAWINGS)
