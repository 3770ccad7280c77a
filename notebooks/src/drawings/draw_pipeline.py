"""The drawings of chapter 19: two stages and their messages, why micro-batches, and two schedules.

Run it to write three SVG files beside it, the same bytes each time. The timelines are simulated: a
forward pass takes 1, a backward pass 2, a message nothing.
"""

from elements import (
    BLUE, FRAME, ORANGE, PALE_BLUE, PALE_GREY, arrow, box, element, group, line, page, words, write,
)

LEFT = 78  # where time begins
RIGHT = 632  # where it ends
ROW = 32  # of a stage
COLORS = {"F": (BLUE, "white"), "B": (ORANGE, "black")}


def steps_of(schedule, stage, stages, micro):
    """What a stage does, one after the other: `[("F" or "B", micro-batch), ...]`."""
    warm_up = {"GPipe": micro, "1F1B": min(stages - stage, micro)}[schedule]
    steps = [("F", number) for number in range(warm_up)]
    for number in range(micro):
        steps.append(("B", number))
        if warm_up + number < micro:
            steps.append(("F", warm_up + number))
    return steps


def simulate(schedule, stages, micro):
    """`[(stage, "F" or "B", micro-batch, start, end), ...]`.

    A pass begins when its stage is free and what it needs has ended: a forward pass needs the one
    on the stage before, a backward pass the one on the stage after, and on the last stage nothing
    but its own forward pass.
    """
    todo = [steps_of(schedule, stage, stages, micro) for stage in range(stages)]
    free = [0] * stages
    ended = {}
    events = []
    while any(todo):
        for stage in range(stages):
            while todo[stage]:
                kind, number = todo[stage][0]
                before = stage - 1 if kind == "F" else stage + 1
                start = free[stage]
                if 0 <= before < stages:
                    if (kind, number, before) not in ended:
                        break
                    start = max(start, ended[kind, number, before])
                end = start + (1 if kind == "F" else 2)
                free[stage] = ended[kind, number, stage] = end
                events.append((stage, kind, number, start, end))
                del todo[stage][0]
    return events


def timeline(top, stages, events, end, **attributes):
    """A row for each stage, its passes as boxes; `end` is the time at the right edge.

    Micro-batches have their numbers, where a box is wide enough for them.
    """
    unit = (RIGHT - LEFT) / end
    last = max(event[-1] for event in events)
    several = len({number for _, _, number, *_ in events}) > 1 and unit > 14
    drawn = [box(LEFT, top, unit * last, ROW * stages, PALE_GREY, "none", class_="idle")]
    for stage in range(stages):
        drawn.append(words(4, top + 22 + ROW * stage, f"stage {stage}", anchor="start"))
    for stage, kind, number, start, stop in events:
        color, ink = COLORS[kind]
        x, y = LEFT + unit * start, top + 2 + ROW * stage
        drawn.append(box(x, y, unit * (stop - start), ROW - 4, color, "white", class_="pass",
                         data_stage=stage, data_kind=kind, data_number=number))
        if several:
            drawn.append(words(x + unit * (stop - start) / 2, y + 20, str(number), fill=ink))
    return group(drawn, class_="timeline", **attributes)


# ---- Two stages, one micro-batch ----


def stage_box(x, title, layers):
    drawn = [box(x, 44, 190, 150, PALE_BLUE, BLUE, stroke_width=2, rx=8),
             words(x + 95, 34, title, 20, bold=True)]
    for row, layer in enumerate(layers):
        drawn.append(words(x + 95, 76 + 28 * row, layer))
    return group(drawn, class_="stage")


def draw_two_stages():
    drawn = [
        stage_box(6, "rank 0: stage 0", ["embedding", "block 0", "block 1"]),
        stage_box(444, "rank 1: stage 1", ["block 2", "block 3", "norm, output", "loss"]),
        arrow(204, 84, 436, 84, BLUE, 6),
        words(320, 68, "hidden states [8, 8, 16]"),
        arrow(436, 156, 204, 156, ORANGE, 6),
        words(320, 186, "their gradient [8, 8, 16]"),
        words(101, 224, "x: 8 sequences"),
        words(539, 224, "y: the next tokens"),
    ]
    return page(640, 236, "Two stages: hidden states go forward, their gradient comes back",
                "Rank 0 has the embedding and blocks 0 and 1, rank 1 blocks 2 and 3, norm, output "
                "and loss. A blue arrow, the hidden states, goes from rank 0 to rank 1; an "
                "orange one, their gradient of the same shape, comes back.", drawn)


# ---- One batch, or four micro-batches ----


def draw_fill(stages=4, micro=4):
    whole = []
    for stage, kind, number, start, stop in simulate("GPipe", stages, 1):
        whole.append((stage, kind, number, micro * start, micro * stop))
    parts = simulate("GPipe", stages, micro)
    end = max(stop for *_, stop in whole)
    unit = (RIGHT - LEFT) / end
    drawn = [words(320, 26, "With micro-batches several stages work at once", 22, bold=True)]
    for panel, (title, events) in enumerate((("the whole batch at once", whole),
                                             (f"the same batch in {micro} micro-batches", parts))):
        top = 76 + 172 * panel
        drawn.append(words(4, top - 12, title, 20, bold=True, anchor="start"))
        drawn.append(timeline(top, stages, events, end, data_name=("whole", "parts")[panel]))
        last = max(stop for *_, stop in events)
        if last < end:
            x = LEFT + unit * last + 12
            drawn.append(words(x, top + 56, f"ends after {last} instead of {end}", 20, bold=True,
                               anchor="start"))
            drawn.append(words(x, top + 84, "(a micro-batch's forward pass = 1)", anchor="start"))
    drawn.append(words(LEFT + unit * micro + 8, 98, "forward", anchor="start"))
    drawn.append(words(LEFT + unit * 24, 98, "idle"))
    drawn.append(words(RIGHT - unit * 2 * micro - 8, 98, "backward", anchor="end"))
    drawn.append(words(LEFT, 76 + 172 + ROW * stages + 24, "time →", anchor="start"))
    return page(640, 410, "Four stages with a whole batch, and with four micro-batches",
                "Two timelines of four stages. Above, one batch goes through the stages and back: "
                "one stage at a time works, and it ends after 48 units of time. Below, the batch "
                "comes in four micro-batches, so that several stages work at a time, and it ends "
                "after 21.", drawn)


# ---- GPipe and 1F1B, moving ----

WHOLE = 14.0  # seconds
REST = 4.0  # the first frame stays so long, and the last


def film_style():
    """What is later than the moment "now" is pale. The first frame is the whole drawing.

    There the line "now" is hidden: it has a meaning only while it moves.
    """
    distance = f"transform: translate({RIGHT - LEFT}px, 0px)"
    rules = [f".moves {{ animation: now {WHOLE:g}s linear infinite; }}"]
    frames = [(0, "transform: translate(0px, 0px); opacity: 0"),
              (REST - 0.1, "transform: translate(0px, 0px); opacity: 0"),
              (REST, "transform: translate(0px, 0px); opacity: 1"),
              (WHOLE - REST, f"{distance}; opacity: 1"),
              (WHOLE - REST + 0.1, f"{distance}; opacity: 0"),
              (WHOLE, f"{distance}; opacity: 0")]
    rules.append("@keyframes now {")
    for seconds, declarations in frames:
        rules.append(f"{100 * seconds / WHOLE:.2f}% {{ {declarations} }}")
    rules.append("}")
    rules.append("@media (prefers-reduced-motion: reduce) { .moves { animation: none; } }")
    return element("style", "\n" + "\n".join(rules) + "\n")


def draw_schedules(stages=4, micro=8):
    drawn = [film_style(),
             words(320, 26, "Both end at the same time; 1F1B goes backward sooner", 22, bold=True)]
    tops = (80, 256)
    for name, top in zip(("GPipe", "1F1B"), tops):
        events = simulate(name, stages, micro)
        last = max(stop for *_, stop in events)
        unit = (RIGHT - LEFT) / last
        drawn.append(words(4, top - 12, name, 20, bold=True, anchor="start"))
        drawn.append(timeline(top, stages, events, last, data_name=name))
        if name == "GPipe":
            drawn.append(words(LEFT, top - 12, "all forward …", anchor="start"))
            drawn.append(words(RIGHT, top - 12, "… then all backward", anchor="end"))
            drawn.append(words(LEFT + unit * 12.5, top + 22, "idle"))
        else:
            drawn.append(words(LEFT, top - 12, "forward (narrow) and backward (wide) in turns",
                               anchor="start"))
    bottom = tops[-1] + ROW * stages
    for time in range(0, last + 1, 3):
        x = LEFT + (RIGHT - LEFT) / last * time
        drawn.append(line(x, bottom + 4, x, bottom + 12, FRAME, 1))
        drawn.append(words(min(x, 628), bottom + 30, str(time), class_="time"))
    drawn.append(words(4, bottom + 30, "time", anchor="start"))
    covers = [box(LEFT, top - 2, RIGHT - LEFT + 8, ROW * stages + 4, "white", "none",
                  fill_opacity=0.8) for top in tops]
    now = line(LEFT, tops[0] - 4, LEFT, bottom + 4, "black", 3, stroke_dasharray="5 4")
    drawn.append(group([*covers, now], class_="moves", opacity=0))
    return page(640, bottom + 42, "GPipe and 1F1B, moving",
                "Two timelines of four stages and eight micro-batches. Both end after 33 units of "
                "time. GPipe runs all forward passes, then all backward passes. In 1F1B a stage "
                "runs a few forward passes, then backward and forward in turns. A dashed line "
                "moves along: it is the present moment.", drawn)


DRAWINGS = {"pipeline_two_stages": draw_two_stages, "pipeline_fill": draw_fill,
            "pipeline_schedules": draw_schedules}

if __name__ == "__main__":
    write(DRAWINGS)
