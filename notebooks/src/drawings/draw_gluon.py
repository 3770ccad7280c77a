"""What Gluon keeps on each device, and two mistakes: an old gradient, and a device named twice.

Run it to write three SVG files beside it, the same bytes each time. All numbers are computed here,
from one weight and two images: the loss is weight times image, so an image's gradient is itself.
"""

from elements import (
    BLUE, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, RED, arrow, box, group, line,
    page, words, write,
)

IMAGES = (2, 20)
WEIGHT = 100
MEAN = sum(IMAGES) // len(IMAGES)
AFTER = WEIGHT - MEAN  # by a step at rate 1


def number(x, y, value, fill="white", stroke="black", width=96, **attributes):
    """A number in a box whose top is at `y`."""
    return group([box(x - width / 2, y, width, 44, fill, stroke, stroke_width=2, rx=6),
                  words(x, y + 30, str(value), 22, bold=True)], data_value=value, **attributes)


def draw_gluon_parameter():
    """A parameter has a value and a gradient on each device, and the store makes the new value."""
    title = "The store adds both gradients and sends one new value"
    columns = (250, 390)
    drawn = [words(320, 32, title, 22, bold=True)]
    for rank, (x, image) in enumerate(zip(columns, IMAGES)):
        drawn.append(box(x - 62, 56, 124, 510, PALE_BLUE, BLUE, stroke_width=2, rx=10))
        drawn.append(words(x, 82, f"cpu({rank})", 20, bold=True))
        drawn.append(number(x, 98, image, PALE_GREY, GREY, class_="image", data_device=rank))
    drawn.append(words(168, 127, "image", anchor="end"))
    drawn.append(box(178, 160, 284, 166, "none", "black", stroke_width=4, rx=10))
    drawn.append(words(476, 249, "one Parameter", 20, "start", bold=True))
    drawn.append(words(168, 215, "values", anchor="end"))
    drawn.append(words(168, 285, "gradients", anchor="end"))
    total = " + ".join(str(image) for image in IMAGES)
    drawn.append(group([
        box(178, 358, 284, 96, PALE_GREY, "black", stroke_width=3, rx=10),
        words(320, 390, f"{total} = {sum(IMAGES)}", 20, bold=True),
        words(320, 432, f"{WEIGHT} − {sum(IMAGES)} / {len(IMAGES)} = {AFTER}", 20, bold=True),
    ], class_="store", data_sum=sum(IMAGES), data_after=AFTER))
    drawn.append(words(168, 390, "sum", anchor="end"))
    drawn.append(words(168, 432, "new value", anchor="end"))
    drawn.append(words(476, 413, "the store", 20, "start", bold=True))
    for rank, (x, image) in enumerate(zip(columns, IMAGES)):
        drawn.append(number(x, 186, WEIGHT, class_="value", data_device=rank))
        drawn.append(number(x, 256, image, "white", BLUE, class_="grad", data_device=rank))
        drawn.append(arrow(x, 302, x, 354, GREEN, 4))
        drawn.append(arrow(x, 458, x, 500, GREEN, 4))
        drawn.append(number(x, 506, AFTER, class_="after", data_device=rank))
    drawn.append(words(168, 535, "new values", anchor="end"))
    return page(640, 590, title,
                f"Two columns, cpu(0) and cpu(1), with the images {IMAGES[0]} and {IMAGES[1]}. A "
                f"frame around both columns is one Parameter: its values are {WEIGHT} on both "
                f"devices, its gradients {IMAGES[0]} and {IMAGES[1]}. Below is the store: it adds "
                f"both gradients to {sum(IMAGES)}, and its weight becomes {AFTER}. Then both "
                f"values are {AFTER}.", drawn)


def draw_step(left, name, images, grads, old):
    """A panel: the images and gradients of both devices, and their sum."""
    drawn = [words(left + 70, 72, name, 20, bold=True)]
    for rank in range(2):
        x = left + 140 * rank
        drawn.append(words(x, 108, f"cpu({rank})"))
        text = ", ".join(str(image) for image in images[rank]) or "no image"
        drawn.append(group([box(x - 56, 122, 112, 44, PALE_GREY, GREY, stroke_width=2, rx=6),
                            words(x, 151, text, 20)], class_="images", data_device=rank,
                           data_images=" ".join(str(image) for image in images[rank])))
        is_old = rank in old
        look = (PALE_ORANGE, ORANGE) if is_old else ("white", BLUE)
        if not is_old:
            drawn.append(arrow(x, 168, x, 200, BLUE, 3))
        drawn.append(number(x, 206, grads[rank], *look, width=112, class_="grad",
                            data_device=rank, data_old="yes" if is_old else "no"))
        if is_old:
            drawn.append(words(x, 194, "old!", 20, bold=True, fill=RED))
        drawn.append(arrow(x, 252, left + 70 + (-24, 24)[rank], 292, GREEN, 3))
    total = sum(grads)
    drawn.append(number(left + 70, 298, f"{grads[0]} + {grads[1]} = {total}",
                        "white", RED if old else "black", width=190))
    return group(drawn, class_="panel", data_name=name, data_total=total)


def draw_old_gradient():
    """A device without images adds its gradient of the step before."""
    everything = sum(IMAGES)
    drawn = [words(320, 32, "An idle device still holds last step's gradient", 22, bold=True),
             line(342, 56, 342, 376, GREY, 1),
             draw_step(130, "step 1", [[IMAGES[0]], [IMAGES[1]]], IMAGES, old=[]),
             draw_step(430, "step 2", [list(IMAGES), []], (everything, IMAGES[1]), old=[1]),
             words(8, 151, "images", anchor="start"), words(8, 235, "grad", anchor="start"),
             words(500, 368, f"right: {everything}", bold=True)]
    return page(640, 384, "An idle device still holds last step's gradient",
                f"Step 1: cpu(0) has the image {IMAGES[0]} and cpu(1) the image {IMAGES[1]}; their "
                f"gradients add up to {everything}. Step 2: both images are on cpu(0), whose "
                f"gradient is {everything}. cpu(1) has no image and still its old gradient, "
                f"{IMAGES[1]}; the sum is {everything + IMAGES[1]}, right would be {everything}.",
                drawn)


def draw_named_twice():
    """Both shards use the same one of two replicas on one device."""
    columns = (210, 430)
    drawn = [words(320, 32, "Both shards use the second replica: 20 overwrites 2", 22, bold=True),
             box(96, 50, 448, 312, PALE_BLUE, BLUE, stroke_width=2, rx=10),
             words(120, 80, "cpu(0)", 20, "start", bold=True)]
    used = columns[-1]
    for place, (x, image) in enumerate(zip(columns, IMAGES)):
        drawn.append(words(x, 118, ("first shard", "second shard")[place]))
        drawn.append(number(x, 130, image, PALE_GREY, GREY, class_="image"))
        start = x + (30 if x < used else 0)
        drawn.append(arrow(start, 178, used - (34 if x < used else 0), 246,
                           BLUE, 4, class_="use"))
    drawn.append(number(columns[0], 252, 0, "white", BLUE, width=130, class_="grad"))
    final = box(used - 65, 252, 130, 44, "white", BLUE, stroke_width=2, rx=6)
    crossed = [line(used - 54, 275, used - 14, 275, RED, 3),
               words(used - 34, 282, str(IMAGES[0]), 22),
               words(used + 22, 282, str(IMAGES[1]), 22, bold=True)]
    drawn.append(group([final, *crossed], class_="grad", data_value=IMAGES[1]))
    drawn.append(words(columns[0], 322, "gradient of"))
    drawn.append(words(columns[0], 345, "the first replica"))
    drawn.append(words(used, 322, "gradient of"))
    drawn.append(words(used, 345, "the second replica"))
    return page(640, 376, "Two replicas on one device, and one is used",
                f"One device, cpu(0), holds two shards, the images {IMAGES[0]} and {IMAGES[1]}, and"
                " two replicas. Arrows lead from both shards to the second replica: its gradient "
                f"{IMAGES[0]} is crossed out and replaced by {IMAGES[1]}. The gradient of the first"
                " replica is 0.", drawn)


DRAWINGS = {"gluon_parameter": draw_gluon_parameter, "named_twice": draw_named_twice,
            "old_gradient": draw_old_gradient}

if __name__ == "__main__":
    write(DRAWINGS)
