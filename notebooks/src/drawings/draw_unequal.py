"""The drawing of chapter 12: when two unequal devices are done, with three ways to cut a batch.

Run it to write the SVG file beside it, the same bytes each time.
"""

from elements import BLUE, GREY, ORANGE, box, group, line, page, words, write

HANDICAP = 3  # an image takes the slow device so many times as long as the fast one
WAYS = [  # how many images go to the fast and to the slow device
    ("the fast one alone", 256, 0),
    ("equal shards", 128, 128),
    ("shares by speed", 192, 64),
]
LEFT = 70
UNIT = 1.34  # how wide the time of an image on the fast device is drawn


def draw_lane(y, name, images, seconds, done, color, height):
    """One device: its images, then the time in which it waits."""
    drawn = [words(LEFT - 10, y + 25, name, 20, "end")]
    width = UNIT * seconds
    if images:
        drawn.append(box(LEFT, y + (38 - height) / 2, width, height, color, "white",
                         class_="shard", data_images=images))
        drawn.append(words(LEFT + width / 2, y + 26, f"{images} images", 20, bold=True,
                           fill="white" if color == BLUE else "black"))
    if images and seconds < done:
        drawn.append(box(LEFT + width, y + 3, UNIT * (done - seconds), 32, "white", GREY,
                         stroke_dasharray="6 4", class_="waits"))
        drawn.append(words(LEFT + UNIT * (seconds + done) / 2, y + 25, "waits", 20))
    return drawn


def draw_shares_by_speed():
    """For each way to cut the batch, two lanes on a line of time, and when both are done."""
    drawn = [words(312, 32, "Cut the batch by speed, and nobody waits", 22, bold=True),
             words(312, 62, f"the slow device needs {HANDICAP} times as long for an image", 20)]
    y = 80
    for name, fast, slow in WAYS:
        done = max(fast, HANDICAP * slow)
        pieces = [words(LEFT, y + 18, name, 20, "start", bold=True)]
        pieces += draw_lane(y + 26, "fast", fast, fast, done, BLUE, 38)
        bottom = y + 64
        if slow:
            pieces += draw_lane(y + 68, "slow", slow, HANDICAP * slow, done, ORANGE, 30)
            bottom = y + 106
        end = LEFT + UNIT * done
        pieces.append(line(end, y + 20, end, bottom + 4, width=3, class_="done"))
        drawn.append(group(pieces, class_="way", data_fast=fast, data_slow=slow))
        y = bottom + 20
    drawn.append(line(LEFT, y + 6, 600, y + 6))
    drawn.append(words(600, y + 30, "time", 20, "end"))
    return page(624, y + 44, "When two unequal devices are done with a batch",
                "The fast device alone works on 256 images. On equal shards of 128 it waits for "
                "the slow one, which takes longer than the fast one alone. With 192 and 64 images "
                "both are done at the same time, before the fast one alone would be.", drawn)


DRAWINGS = {"shares_by_speed": draw_shares_by_speed}

if __name__ == "__main__":
    write(DRAWINGS)
