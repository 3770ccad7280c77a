"""The drawing of chapter 06: from images to a step on two devices.

Run it to write the SVG file beside it, the same bytes each time.
"""

from elements import (
    BLUE, DARK_GREEN, FRAME, GREEN, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, arrow,
    box, group, page, words, write,
)

MIDDLE, LEFT, RIGHT = 320, 190, 450


def stack(x, y, count, fill, stroke, **attributes):
    """Cards one behind the other: several examples."""
    cards = []
    for card in reversed(range(count)):
        cards.append(box(x - 120 + 7 * card, y + 7 * (count - 1 - card), 240, 46, fill, stroke,
                         stroke_width=2, rx=6))
    return group(cards, **attributes)


def call(x, y, name, anchor="middle"):
    """The call that leads from one row to the next, at its arrows."""
    return words(x, y, name, 19, anchor, bold=True, fill=DARK_GREEN)


def draw_pictures_to_step():
    """Bytes become numbers, numbers a batch, the batch two shards, and both one step."""
    drawn = [words(320, 34, "Two halves of the batch, the same new weights", 22, bold=True)]
    drawn += [stack(MIDDLE, 62, 3, "white", FRAME, class_="row", data_shape="28 × 28 × 1"),
              words(MIDDLE, 106, "28 × 28 × 1, bytes"),
              arrow(MIDDLE, 126, MIDDLE, 170, GREEN, 3),
              call(MIDDLE + 16, 154, "ToTensor", "start"),
              stack(MIDDLE, 172, 3, PALE_GREY, FRAME, class_="row", data_shape="1 × 28 × 28"),
              words(MIDDLE, 216, "1 × 28 × 28, 0 to 1"),
              arrow(MIDDLE, 236, MIDDLE, 280, GREEN, 3),
              call(MIDDLE + 16, 266, "DataLoader", "start"),
              box(MIDDLE - 140, 284, 280, 50, PALE_GREY, "black", stroke_width=2, rx=6),
              words(MIDDLE, 315, "a batch: 64 × 1 × 28 × 28"), call(MIDDLE, 376, "split_and_load")]
    for x, device, color, pale in ((LEFT, 0, BLUE, PALE_BLUE), (RIGHT, 1, ORANGE, PALE_ORANGE)):
        drawn += [arrow(MIDDLE + (x - MIDDLE) * 0.5, 337, x, 390, GREEN, 3),
                  group([box(x - 100, 394, 200, 70, pale, color, stroke_width=2, rx=8),
                         words(x, 422, f"device {device}", bold=True), words(x, 450, "32 images")],
                        class_="shard", data_images=32),
                  arrow(x, 467, x, 516, "black", 3),
                  group([box(x - 100, 520, 200, 50, pale, color, stroke_width=2, rx=8),
                         words(x, 551, "gradients")]),
                  arrow(x, 573, MIDDLE + (x - MIDDLE) * 0.5, 622, GREEN, 3)]
    drawn += [call(MIDDLE, 498, "backward"), call(MIDDLE, 600, "trainer.step(64)"),
              box(MIDDLE - 230, 626, 460, 50, PALE_GREEN, GREEN, stroke_width=2, rx=8),
              words(MIDDLE, 657, "the same new weights on both")]
    return page(640, 700, "From images to the same step on two devices",
                "Images of bytes become numbers from 0 to 1, by ToTensor. The DataLoader makes a "
                "batch of 64 of them. split_and_load sends 32 to each of two devices, which "
                "compute gradients. step(64) adds them up, and both devices get the same new "
                "weights.", drawn)


DRAWINGS = {"pictures_to_step": draw_pictures_to_step}

if __name__ == "__main__":
    write(DRAWINGS)
