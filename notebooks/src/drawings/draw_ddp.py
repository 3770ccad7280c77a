"""The drawings of chapter 14.

Run it to write two SVG files beside it, the same bytes each time. They show one backward pass of
three layers, from left to right, and when the gradients of each are sent.
"""

from typing import NamedTuple

from elements import (
    BLUE, FRAME, ORANGE, PALE_BLUE, PALE_GREY, arrow, box, element, group, line, page, words, write,
)

LAYERS = ("last", "second", "first")  # in the order of the backward pass
GRADIENTS = ("bias", "weight")  # of each layer, in the order in which they are ready
BUCKETS = (("last", "second"), ("first",))
LEFT = 118  # where the pass begins


class Scale(NamedTuple):
    """Lengths on the axis of time."""

    layer: int  # the backward pass of one layer
    latency: int  # of an all-reduce, whatever is in it
    each: int  # and for each part of it: a gradient in the moving drawing, a layer's in the other


MOVING, STILL = Scale(120, 56, 14), Scale(66, 88, 10)


def layer_end(layer, scale=MOVING):
    """When a layer's gradients are there."""
    return LEFT + scale.layer * (LAYERS.index(layer) + 1)


def all_reduces(parts, overlapped, scale=MOVING):
    """`[(gradients, begin, end)]`: each part leaves when it is complete and the link is free.

    parts: for each all-reduce the layer of each part of it.
    """
    found = []
    free = 0
    for layers in parts:
        complete = layer_end(layers[-1] if overlapped else LAYERS[-1], scale)
        begin = max(complete, free)
        free = begin + scale.latency + scale.each * len(layers)
        found.append((layers, begin, free))
    return found


def in_buckets():
    """Each bucket, with a layer's name for each of its gradients."""
    return [[layer for layer in layers for _ in GRADIENTS] for layers in BUCKETS]


# ---- Buckets, moving ----

WHOLE = 9.0  # seconds
REST = 1.5  # the first frame stays so long
SECONDS_A_UNIT = (WHOLE - 2 * REST) / (640 - LEFT)


def moment(x):
    """When the film has come to a place on the axis."""
    return REST + (x - LEFT) * SECONDS_A_UNIT


def keyframes(name, frames):
    """A CSS animation; `frames` are `(seconds, declarations)`."""
    lines = [f"@keyframes {name} {{"]
    for seconds, declarations in frames:
        lines.append(f"{100 * seconds / WHOLE:.2f}% {{ {declarations} }}")
    return " ".join([*lines, "}"])


def film_style():
    """What appears when. Its first frame, and without animation each, is the whole drawing.

    There the line "now" is hidden: it has a meaning only while it moves.
    """
    rules = [f".moves {{ animation-duration: {WHOLE:g}s; animation-iteration-count: infinite; "
             f"animation-timing-function: linear; }}"]
    begins = {}
    for layer in LAYERS:
        begins[f"layer{layer}"] = (layer_end(layer) - MOVING.layer, layer_end(layer))
        begins[f"gradient{layer}"] = (layer_end(layer) - 10, layer_end(layer))
    for layers, begin, end in all_reduces(in_buckets(), overlapped=True):
        begins[f"sent{layers[0]}"] = (begin, end)
    for name, (begin, end) in begins.items():
        rules.append(keyframes(name, [
            (0, "opacity: 1"), (REST - 0.1, "opacity: 1"), (REST, "opacity: 0.12"),
            (moment(begin) + 0.01, "opacity: 0.12"), (moment(end), "opacity: 1"),
            (WHOLE, "opacity: 1")]))
        rules.append(f".{name} {{ animation-name: {name}; }}")
    begin = "transform: translate(0px, 0px)"
    end = f"transform: translate({640 - LEFT}px, 0px)"
    rules.append(keyframes("now", [
        (0, f"{begin}; opacity: 0"), (REST - 0.1, f"{begin}; opacity: 0"),
        (REST, f"{begin}; opacity: 1"), (WHOLE - REST, f"{end}; opacity: 1"),
        (WHOLE, f"{end}; opacity: 1")]))
    rules.append(".now { animation-name: now; }")
    rules.append("@media (prefers-reduced-motion: reduce) { .moves { animation: none; } }")
    return element("style", "\n" + "\n".join(rules) + "\n")


def span(x, top, width, fill, text, ink="white", **attributes):
    """A part of a row, from `x` on."""
    return group([box(x, top, width, 50, fill, "white", stroke_width=2),
                  words(x + width / 2, top + 32, text, fill=ink, bold=True)], **attributes)


def draw_buckets():
    """Chapter 14: buckets fill during the backward pass, and a full one leaves."""
    drawn = [film_style(),
             words(320, 26, "A full bucket is sent while the pass goes on", 22, bold=True)]
    drawn.append(words(8, 96, "backward", anchor="start"))
    drawn.append(words(8, 214, "buckets", anchor="start"))
    drawn.append(words(8, 338, "all-reduce", anchor="start"))
    for layer in LAYERS:
        x = layer_end(layer) - MOVING.layer
        drawn.append(span(x, 64, MOVING.layer, BLUE, f"net.{layer}",
                          class_=f"moves layer{layer} pass", data_layer=layer))
    for layers, begin, end in all_reduces(in_buckets(), overlapped=True):
        number = len([drawing for drawing in drawn if 'class="bucket"' in drawing]) + 1
        left = layer_end(layers[0]) - MOVING.layer
        width = MOVING.layer * len(BUCKETS[number - 1]) - 8
        drawn.append(group([
            box(left + 4, 162, width, 88, PALE_GREY, FRAME, stroke_width=3, rx=6),
            words(left + 4 + width / 2, 240, f"bucket {number}", bold=True),
        ], class_="bucket", data_bucket=number))
        for layer in BUCKETS[number - 1]:
            x = layer_end(layer) - MOVING.layer
            inside = [arrow(x + MOVING.layer / 2, 116, x + MOVING.layer / 2, 168, BLUE, 3)]
            for place, name in enumerate(GRADIENTS):
                at = x + 10 + 46 * place
                wide = 42 if name == "bias" else 56
                inside.append(box(at, 172, wide, 42, PALE_BLUE, BLUE, stroke_width=2))
                inside.append(words(at + wide / 2, 199, name, 17))
            drawn.append(group(inside, class_=f"moves gradient{layer} gradient", data_layer=layer))
        drawn.append(span(begin, 306, end - begin, ORANGE, f"bucket {number}", "black",
                          class_=f"moves sent{layers[0]} sent", data_bucket=number))
        drawn.append(group([
            arrow(left + 4 + width / 2, 252, (begin + end) / 2, 303, ORANGE, 3),
        ], class_=f"moves sent{layers[0]} leaves", data_bucket=number))
    drawn.append(group([
        line(LEFT, 62, LEFT, 380, "black", 3, stroke_dasharray="5 4"),
        words(LEFT, 54, "now"),
    ], class_="moves now", opacity=0))
    drawn.append(arrow(LEFT, 380, 632, 380, "black", 2))
    drawn.append(words(600, 406, "time"))
    return page(640, 420, "Buckets fill during the backward pass, moving", (
        "A backward pass goes from the last layer to the first. The gradients of last and second, "
        "a bias and a weight each, fill bucket 1, whose all-reduce begins while the pass goes on "
        "with first. The gradients of first fill bucket 2, which is sent at the end. A dashed line "
        "moves along: it is the present moment."), drawn)


# ---- Three ways to send ----

WAYS = {  # for each: its all-reduces, each with the layers in it, and whether the pass goes on
    "naive": ([["first"], ["second"], ["last"]], False),
    "overlapped": ([["last"], ["second"], ["first"]], True),
    "buckets": (BUCKETS, True)}


def draw_ways():
    """Chapter 14: the same gradients, sent in three ways."""
    drawn = [words(320, 32, "Overlap ends sooner, and buckets sooner still", 22, bold=True)]
    for row, (name, (parts, overlapped)) in enumerate(WAYS.items()):
        top = 60 + 112 * row
        rows = [words(8, top + 48, name, 18, anchor="start", bold=True)]
        for layer in LAYERS:
            x = layer_end(layer, STILL) - STILL.layer
            rows.append(group([
                box(x, top, STILL.layer, 42, BLUE, "white", stroke_width=2),
                words(x + STILL.layer / 2, top + 27, layer, 17, fill="white"),
            ], class_="pass", data_layer=layer))
        for layers, begin, end in all_reduces(parts, overlapped, STILL):
            rows.append(group([
                box(begin, top + 44, end - begin, 42, ORANGE, "white", stroke_width=2),
                words((begin + end) / 2, top + 71, ", ".join(layers), 17),
            ], class_="all-reduce"))
        drawn.append(group(rows, class_="way", data_name=name))
    drawn.append(arrow(LEFT, 390, 632, 390, "black", 2))
    drawn.append(words(610, 416, "time"))
    drawn.append(words(layer_end(LAYERS[-1], STILL) + 10, 87, "backward pass", anchor="start"))
    drawn.append(words(layer_end(LAYERS[-1], STILL) - 8, 131, "all-reduces", anchor="end"))
    return page(640, 432, "A backward pass of three layers, and three ways to send its gradients", (
        "Naive makes three all-reduces after the pass. Overlapped makes three, each as soon as the "
        "layer's gradients are there. Buckets makes one for two layers while the pass goes on, "
        "then one for the other."), drawn)


DRAWINGS = {"ddp_buckets": draw_buckets, "ddp_ways": draw_ways}

if __name__ == "__main__":
    write(DRAWINGS)
