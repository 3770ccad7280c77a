"""The drawings of chapter 15: who starts whom, and what a checkpoint holds; and of its deeper
notebook: a parameter server, and a gradient that comes late.

Run it to write four SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, arrow, box,
    group, line, page, words, write,
)

MACHINES, DEVICES = 2, 2


def process(x, y, rank, local_rank):
    """A process, with its two numbers."""
    return group([box(x, y, 118, 84, PALE_BLUE, BLUE, stroke_width=3, rx=8),
                  words(x + 59, y + 36, f"rank {rank}", 22, bold=True),
                  words(x + 59, y + 66, f"local rank {local_rank}")],
                 class_="process", data_rank=rank, data_local_rank=local_rank)


def draw_torchrun():
    """Two machines: a torchrun on each, which starts the processes; a rendezvous on the first."""
    drawn = [words(320, 32, "One torchrun per machine, one process per device", 22, bold=True)]
    for machine in range(MACHINES):
        left = 16 + 312 * machine
        middle = left + 148
        held = [box(left, 52, 296, 318, "white", FRAME, stroke_width=2, rx=10),
                box(middle - 70, 174, 140, 42, PALE_GREY, "black", stroke_width=2, rx=6),
                words(middle, 202, "torchrun", 20, bold=True)]
        if machine == 0:  # HOST
            held.append(group([box(middle - 100, 72, 200, 46, PALE_ORANGE, ORANGE,
                                   stroke_width=3, rx=22),
                               words(middle, 102, "rendezvous", 20, bold=True)],
                              class_="rendezvous"))
        for local_rank in range(DEVICES):
            x = left + 20 + 138 * local_rank
            held.append(arrow(middle + 40 * (2 * local_rank - 1), 218, x + 59, 252, "black", 3))
            held.append(process(x, 256, machine * DEVICES + local_rank, local_rank))
        name = "machine 0 = HOST" if machine == 0 else f"machine {machine}"
        held.append(words(middle, 396, name, 20))
        drawn.append(group(held, class_="machine", data_machine=machine))
    drawn.append(arrow(164, 172, 164, 122, ORANGE, 4))
    drawn.append(arrow(402, 186, 258, 124, ORANGE, 4))
    return page(640, 412, "One torchrun per machine, one process per device",
                "Machine 0 is HOST and keeps the rendezvous. It runs a torchrun that has started "
                "rank 0 with local rank 0, and rank 1 with local rank 1. Machine 1 runs one that "
                "has started rank 2 with local rank 0, and rank 3 with local rank 1. Arrows lead "
                "from both torchruns to the rendezvous.", drawn)


CHANGES = (  # name, and what it is in our program
    ("model", "weights"),
    ("optimizer", "momentum"),
    ("step", "which images are next"),
    ("random states", "one for each rank"),
)


def draw_checkpoint():
    """What changes in the processes goes into the file, and from there into new processes."""
    drawn = [words(320, 32, "All that changes during training", 22, bold=True)]
    top, height = 92, 66
    bottom = top + height * len(CHANGES)
    drawn.append(box(16, 52, 126, bottom - 32, PALE_BLUE, BLUE, stroke_width=3, rx=8))
    drawn.append(box(498, 52, 126, bottom - 32, "white", BLUE, stroke_width=3, rx=8))
    drawn.append(words(79, 190, "processes", 18, bold=True))
    drawn.append(words(79, 216, "that are"))
    drawn.append(words(79, 240, "killed"))
    drawn.append(words(561, 190, "new", 18, bold=True))
    drawn.append(words(561, 216, "processes", 18, bold=True))
    drawn.append(box(204, 52, 232, bottom - 32, PALE_GREY, "black", stroke_width=3, rx=8))
    drawn.append(words(320, 80, "checkpoint", 20, bold=True))
    for number, (name, what) in enumerate(CHANGES):
        y = top + height * number
        drawn.append(group([box(216, y, 208, height - 8, PALE_GREEN, GREEN, stroke_width=2, rx=6),
                            words(320, y + 25, name, 20, bold=True),
                            words(320, y + 48, what, 17)], class_="part", data_name=name))
        middle = y + (height - 8) / 2
        drawn.append(arrow(146, middle, 200, middle, "black", 3))
        drawn.append(arrow(440, middle, 494, middle, "black", 3))
    return page(640, bottom + 36, "A checkpoint holds all that changes during training",
                "A file with four parts: the model's weights, the optimizer's momentum, the step, "
                "which says which images are next, and the random states, one for each rank. An "
                "arrow leads into each part from the processes that are killed, and from each part "
                "to new processes.", drawn)


def draw_parameter_server():
    """Workers push gradients to the server and pull sums; the scheduler stands apart."""
    drawn = [words(320, 32, "Gradients in, their sum out", 22, bold=True)]
    drawn.append(group([box(230, 56, 180, 74, PALE_ORANGE, ORANGE, stroke_width=3, rx=8),
                        words(320, 86, "server", 20, bold=True),
                        words(320, 114, "1 + 2 + 3 = 6", 20)], class_="server"))
    for rank in range(3):
        x = 112 + 208 * rank
        drawn.append(group([box(x - 84, 246, 168, 72, PALE_BLUE, BLUE, stroke_width=3, rx=8),
                            words(x, 276, f"worker {rank}", 20, bold=True),
                            words(x, 304, f"has {rank + 1}, gets 6")],
                           class_="worker", data_rank=rank, data_value=rank + 1))
        toward = 320 + 56 * (rank - 1)
        drawn.append(arrow(x - 14, 242, toward - 12, 134, BLUE, 4))
        drawn.append(arrow(toward + 12, 134, x + 14, 242, ORANGE, 4, dashed=True))
    drawn.append(box(466, 56, 158, 74, "white", GREY, stroke_width=2, rx=8))
    drawn.append(words(545, 86, "scheduler"))
    drawn.append(words(545, 114, "introduces all"))
    return page(640, 336, "Workers push gradients to a server and pull their sum",
                "Three workers have 1, 2 and 3. Solid arrows lead from them to the server, which "
                "adds them up to 6; dashed arrows lead back, and each gets 6. A scheduler stands "
                "beside the server; no arrow leads to it.", drawn)


MEANWHILE = 3  # updates by worker 0 while worker 1 computes
NUMBERS = {1: "One update", 2: "Two updates", 3: "Three updates"}


def draw_stale_gradient():
    """Time goes to the right: one worker's updates while the other computes a single gradient."""
    said = f"{NUMBERS[MEANWHILE]} meanwhile: a gradient of age {MEANWHILE}"
    drawn = [words(320, 32, said, 22, bold=True)]
    for name, y in [("worker 0", 88), ("server", 154), ("worker 1", 220)]:
        drawn.append(words(54, y + 6, name, 20, bold=True))
    drawn.append(line(110, 154, 630, 154, GREY, 2))

    def work(worker, begin, end, y, text):
        return group([box(begin, y - 24, end - begin, 48, PALE_BLUE, BLUE, stroke_width=3, rx=6),
                      words((begin + end) / 2, y + 6, text)],
                     class_="work", data_worker=worker, data_begin=begin, data_end=end)

    def update(worker, time, number):
        from_y = 114 if worker == 0 else 194
        to_y = 136 if worker == 0 else 172
        return group([arrow(time, from_y, time, to_y, BLUE, 4),
                      box(time - 16, 138, 32, 32, PALE_ORANGE, ORANGE, stroke_width=3, rx=16),
                      words(time, 160, str(number))],
                     class_="update", data_worker=worker, data_time=time)

    width, gap = 118, 24  # of worker 0's gradients
    time = 112
    for number in range(1, MEANWHILE + 1):
        drawn.append(work(0, time, time + width, 88, "gradient"))
        drawn.append(update(0, time + width + gap / 2, number))
        time += width + gap
    drawn.append(work(1, 112, time + 24, 220, f"gradient, of age {MEANWHILE} when it arrives"))
    drawn.append(update(1, time + 46, MEANWHILE + 1))
    return page(640, 262, said,
                "Time goes to the right. Worker 0 computes one gradient after the other, and the "
                f"server updates with each: updates 1 to {MEANWHILE}. Meanwhile worker 1 computes "
                f"a single gradient. The server takes it as update {MEANWHILE + 1}.", drawn)


DRAWINGS = {"checkpoint": draw_checkpoint, "parameter_server": draw_parameter_server,
            "stale_gradient": draw_stale_gradient, "torchrun": draw_torchrun}

if __name__ == "__main__":
    write(DRAWINGS)
