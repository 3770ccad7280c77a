"""The drawings of chapter 15: a training that is killed and goes on, and who starts whom; and of
its deeper notebook: a parameter server, and a gradient that comes late.

Run it to write four SVG files beside it, the same bytes each time.
"""

from elements import (
    BLUE, FRAME, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, RED, arrow,
    box, group, line, page, words, write,
)

FIRST, KILLED, LAST = 12, 22, 27  # the steps that are drawn; before which one it is killed
EVERY = 4  # steps from one checkpoint to the next


def step_box(x, y, step, color, border):
    """A step that was done."""
    return group([box(x, y, 34, 34, color, border, stroke_width=2, rx=4),
                  words(x + 17, y + 23, str(step))], class_="step", data_step=step)


def draw_kill_and_resume():
    """Steps from left to right; below them those of the new processes, from the last checkpoint."""
    drawn = [words(320, 30, "Killed, and begun again at the last checkpoint", 22, bold=True)]
    resumed = KILLED - KILLED % EVERY
    place = {step: 22 + 37 * (step - FIRST) for step in range(FIRST, LAST + 1)}
    for step in range(FIRST, KILLED + 1, EVERY):
        x = place[step] - 2
        drawn.append(group([box(x - 16, 62, 32, 24, PALE_GREEN, GREEN, stroke_width=2, rx=4),
                            line(x, 86, x, 138, GREEN, 3)], class_="checkpoint", data_step=step))
    drawn.append(words(place[resumed] + 24, 80, "checkpoint", anchor="start"))
    for step in range(FIRST, KILLED):
        lost = step >= resumed
        drawn.append(step_box(place[step], 98, step, PALE_GREY if lost else PALE_BLUE,
                              GREY if lost else BLUE))
    x = place[KILLED]
    drawn.append(line(x + 4, 104, x + 26, 126, RED, 5))
    drawn.append(line(x + 4, 126, x + 26, 104, RED, 5))
    drawn.append(words(x + 38, 122, "killed", 20, anchor="start", bold=True, fill=RED))
    drawn.append(arrow(place[resumed] - 2, 142, place[resumed] - 2, 176, GREEN, 4))
    drawn.append(words(place[resumed] - 20, 206, "new processes", 20, anchor="end", bold=True))
    for step in range(resumed, LAST + 1):
        drawn.append(step_box(place[step], 182, step, PALE_BLUE, BLUE))
    return page(640, 236, "Killed, and begun again at the last checkpoint",
                f"Steps {FIRST} to {KILLED - 1} in a row, with a checkpoint before every fourth; "
                f"then the training is killed. Below, new processes begin at step {resumed}, "
                f"so that steps {resumed} to {KILLED - 1} are done twice.", drawn)


DEVICES = 2
MACHINES = ("HOST", "another machine")


def process(x, y, local_rank):
    """A process, with its number on this machine; that in the job isn't known yet."""
    return group([box(x, y, 118, 84, PALE_BLUE, BLUE, stroke_width=3, rx=8),
                  words(x + 59, y + 36, "rank ?", 22, bold=True),
                  words(x + 59, y + 66, f"local rank {local_rank}")],
                 class_="process", data_local_rank=local_rank)


def draw_torchrun():
    """Two machines: a torchrun on each, which starts the processes; a rendezvous on HOST."""
    drawn = [words(320, 32, "One torchrun per machine, one process per device", 22, bold=True)]
    for number, name in enumerate(MACHINES):
        left = 16 + 312 * number
        middle = left + 148
        held = [box(left, 52, 296, 318, "white", FRAME, stroke_width=2, rx=10),
                box(middle - 70, 174, 140, 42, PALE_GREY, "black", stroke_width=2, rx=6),
                words(middle, 202, "torchrun", 20, bold=True)]
        if name == "HOST":
            held.append(group([box(middle - 100, 72, 200, 46, PALE_ORANGE, ORANGE,
                                   stroke_width=3, rx=22),
                               words(middle, 102, "rendezvous", 20, bold=True)],
                              class_="rendezvous"))
        for local_rank in range(DEVICES):
            x = left + 20 + 138 * local_rank
            held.append(arrow(middle + 40 * (2 * local_rank - 1), 218, x + 59, 252, "black", 3))
            held.append(process(x, 256, local_rank))
        held.append(words(middle, 396, name, 20))
        drawn.append(group(held, class_="machine", data_name=name))
    drawn.append(arrow(164, 172, 164, 122, ORANGE, 4))
    drawn.append(arrow(402, 186, 258, 124, ORANGE, 4))
    return page(640, 412, "One torchrun per machine, one process per device",
                "HOST keeps the rendezvous. It runs a torchrun that has started two processes, "
                "with the local ranks 0 and 1. Another machine runs one that has done the same. "
                "The ranks of the four aren't known. Arrows lead from both torchruns to the "
                "rendezvous.", drawn)


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


DRAWINGS = {"kill_and_resume": draw_kill_and_resume, "parameter_server": draw_parameter_server,
            "stale_gradient": draw_stale_gradient, "torchrun": draw_torchrun}

if __name__ == "__main__":
    write(DRAWINGS)
