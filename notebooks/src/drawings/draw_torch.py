"""The drawings of chapter 13: MXNet's words and PyTorch's, and a forward pass of DataParallel.

Run it to write the two SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, GREEN, ORANGE, PALE_BLUE, PALE_GREY, PALE_ORANGE, arrow, box, group, line, page, words,
    write,
)

SAME, OTHER = "same", "other"
ENTRIES = [  # what is meant, MXNet's word, PyTorch's, and whether they mean the same
    ("move", "as_in_context", "to", SAME),
    ("2nd device", "mx.cpu(1)", "cpu:1 is cpu", OTHER),
    ("cut 10 for 4", "3 3 2 2", "3 3 3 1", OTHER),
    ("2nd backward", "replaces grad", "adds to grad", OTHER),
    ("loss", "one per image", "their mean", OTHER),
    ("momentum", "rate in velocity", "rate afterwards", OTHER),
]
SIZES = [4, 4, 2]  # of ten images on three devices, by chunk
COLORS = [BLUE, ORANGE, GREEN]
CELL = 35  # how wide an image is drawn


def draw_dictionary():
    """Two columns of words; between them = or ≠."""
    drawn = [words(276, 36, "MXNet", 24, bold=True), words(518, 36, "PyTorch", 24, bold=True)]
    y = 54
    for meaning, ours, theirs, kind in ENTRIES:
        fill = PALE_BLUE if kind == SAME else PALE_ORANGE
        edge = BLUE if kind == SAME else ORANGE
        width = 1.5 if kind == SAME else 3
        mark = "=" if kind == SAME else "≠"
        drawn.append(group([
            words(150, y + 31, meaning, 20, "end"),
            box(164, y, 212, 46, fill, edge, stroke_width=width, rx=6),
            words(270, y + 31, ours, 20, class_="ours"),
            words(397, y + 33, mark, 28, bold=True),
            box(418, y, 200, 46, fill, edge, stroke_width=width, rx=6),
            words(518, y + 31, theirs, 20, class_="theirs"),
        ], class_="entry", data_kind=kind))
        y += 58
    return page(632, y + 2, "MXNet's words and PyTorch's: which mean the same",
                "Six rows. Moving means the same in both. A second device, cutting a batch, a "
                "second backward pass, the loss and momentum are marked as not the same.", drawn)


def draw_data_parallel():
    """Scatter, replicate, parallel apply, gather; and gradients that add up on their way back."""
    left = 150
    drawn = []
    for y, step in [(54, "1 scatter"), (117, "2 replicate"), (208, "3 apply"), (323, "4 gather")]:
        drawn.append(words(506, y, step, 21, "start", bold=True))
    batch, replicas, scores = [], [], []
    begin = 0
    for size, color in zip(SIZES, COLORS):
        x = left + begin * CELL
        width = size * CELL - 6
        center = x + width / 2
        ink = "black" if color == ORANGE else "white"
        batch.append(box(x, 26, width, 42, color, "black", class_="shard", data_images=size))
        batch.append(words(center, 54, f"{size} images" if size > 2 else "2", 20, fill=ink))
        replicas.append(box(center - 33, 152, 66, 100, PALE_GREY, color, stroke_width=5, rx=6,
                            class_="replica"))
        replicas.append(words(center, 208, "replica", 17))
        drawn.append(arrow(center + 14, 70, center + 14, 148, width=4, color=color))
        drawn.append(arrow(center - 16, 110, center - 16, 148, width=3))
        drawn.append(arrow(center, 256, center, 292, width=4, color=color))
        rail_end = center - 16
        scores.append(box(x, 296, width, 42, color, "black", class_="scores", data_images=size))
        scores.append(words(center, 323, f"{size} scores" if size > 2 else "2", 20, fill=ink))
        drawn.append(line(center, 338, center, 372, width=6))  # where the way back begins
        begin += size
    scores.append(box(left - 5, 291, begin * CELL + 4, 52, "none", "black", stroke_width=3))
    drawn += [group(batch), group(replicas), group(scores)]
    drawn.append(box(8, 152, 100, 100, PALE_GREY, "black", stroke_width=3, rx=6))
    drawn.append(words(58, 208, "network", 20))
    drawn.append(line(58, 152, 58, 110, width=3))
    drawn.append(line(56.5, 110, rail_end + 1.5, 110, width=3))
    drawn.append(line(center + 3, 372, 58, 372, width=6))
    drawn.append(arrow(58, 375, 58, 258, width=6))
    drawn.append(words(320, 404, "back: the gradients of the replicas add up", 21, bold=True))
    return page(632, 420, "One forward pass of DataParallel and its way back",
                "A batch of ten images is scattered into shards of 4, 4 and 2; the network is "
                "replicated for each; replicas are applied in parallel; scores are gathered. On "
                "the way back the gradients of the replicas add up in the network.", drawn)


DRAWINGS = {"dictionary": draw_dictionary, "data_parallel": draw_data_parallel}

if __name__ == "__main__":
    write(DRAWINGS)
