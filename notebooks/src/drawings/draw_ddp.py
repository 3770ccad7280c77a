"""The drawings of chapter 14.

Run it to write three SVG files beside it, the same bytes each time. Two show one backward pass of
four layers, from left to right, and when the gradients are sent; one shows what two ranks send in
another order.
"""

from typing import NamedTuple

from elements import (
    BLUE, FRAME, ORANGE, PALE_BLUE, PALE_GREY, arrow, box, element, group, line, page, words, write,
)

LAYERS = (4, 3, 2, 1)  # in the order of the backward pass
BUCKETS = ((4, 3), (2, 1))
LEFT = 118  # where the pass begins


class Scale(NamedTuple):
    """Lengths on the axis of time."""

    layer: int  # the backward pass of one layer
    latency: int  # of a message, whatever is in it
    each: int  # and for each layer that is in it


MOVING, STILL = Scale(92, 34, 26), Scale(58, 62, 6)


def layer_end(layer, scale=MOVING):
    """When a layer's gradients are there."""
    return LEFT + scale.layer * (LAYERS.index(layer) + 1)


def messages(parts, overlapped, scale=MOVING):
    """`[(layers, begin, end)]`: each part leaves when it is complete and the link is free."""
    found = []
    free = 0
    for layers in parts:
        complete = layer_end(layers[-1] if overlapped else LAYERS[-1], scale)
        begin = max(complete, free)
        free = begin + scale.latency + scale.each * len(layers)
        found.append((layers, begin, free))
    return found


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
    for layers, begin, end in messages(BUCKETS, overlapped=True):
        begins[f"message{layers[0]}"] = (begin, end)
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
             words(320, 26, "A bucket leaves with its last gradient", 22, bold=True)]
    drawn.append(words(8, 96, "backward", anchor="start"))
    drawn.append(words(8, 214, "buckets", anchor="start"))
    drawn.append(words(8, 338, "link", anchor="start"))
    for layer in LAYERS:
        x = layer_end(layer) - MOVING.layer
        drawn.append(span(x, 64, MOVING.layer, BLUE, f"layer {layer}",
                          class_=f"moves layer{layer} pass", data_layer=layer))
    for layers, begin, end in messages(BUCKETS, overlapped=True):
        left = layer_end(layers[0]) - MOVING.layer
        number = BUCKETS.index(layers) + 1
        width = 2 * MOVING.layer - 8
        drawn.append(group([
            box(left + 4, 162, width, 88, PALE_GREY, FRAME, stroke_width=3, rx=6),
            words(left + 4 + width / 2, 240, f"bucket {number}", bold=True),
        ], class_="bucket", data_bucket=number))
        for layer in layers:
            x = layer_end(layer) - MOVING.layer
            drawn.append(group([
                arrow(x + MOVING.layer / 2, 116, x + MOVING.layer / 2, 168, BLUE, 3),
                box(x + 16, 172, MOVING.layer - 32, 42, PALE_BLUE, BLUE, stroke_width=2),
                words(x + MOVING.layer / 2, 199, f"g{layer}"),
            ], class_=f"moves gradient{layer} gradient", data_layer=layer))
        drawn.append(span(begin, 306, end - begin, ORANGE, f"bucket {number}", "black",
                          class_=f"moves message{layers[0]} message", data_bucket=number))
        drawn.append(group([
            arrow(left + 4 + width / 2, 252, (begin + end) / 2, 303, ORANGE, 3),
        ], class_=f"moves message{layers[0]} leaves", data_bucket=number))
    drawn.append(group([
        line(LEFT, 62, LEFT, 380, "black", 3, stroke_dasharray="5 4"),
        words(LEFT, 54, "now"),
    ], class_="moves now", opacity=0))
    drawn.append(arrow(LEFT, 380, 632, 380, "black", 2))
    drawn.append(words(600, 406, "time"))
    drawn.append(words(LEFT, 406, "g4: the gradients of layer 4", anchor="start"))
    return page(640, 420, "Buckets fill during the backward pass, moving", (
        "A backward pass goes from layer 4 to layer 1. The gradients of layers 4 and 3 fill "
        "bucket 1, which is sent over the link while the pass goes on with layers 2 and 1. "
        "Their gradients fill bucket 2, which is sent at the end. A dashed line moves along: it "
        "is the present moment."), drawn)


# ---- Four ways to send ----

SINGLE = ((4,), (3,), (2,), (1,))
IN_ORDER = ((1,), (2,), (3,), (4,))
WAYS = {
    "naive": (IN_ORDER, False), "flat": ((LAYERS,), False),
    "overlapped": (SINGLE, True), "buckets": (BUCKETS, True)}


def draw_ways():
    """Chapter 14: the same gradients, sent in four ways."""
    drawn = [words(320, 32, "Four ways to send the gradients of four layers", 22, bold=True)]
    ends = {}
    for row, (name, (parts, overlapped)) in enumerate(WAYS.items()):
        top = 56 + 112 * row
        rows = [words(8, top + 48, name, 20, anchor="start", bold=True)]
        for layer in LAYERS:
            x = layer_end(layer, STILL) - STILL.layer
            rows.append(group([
                box(x, top, STILL.layer, 42, BLUE, "white", stroke_width=2),
                words(x + STILL.layer / 2, top + 28, f"layer {layer}", 17, fill="white"),
            ], class_="pass", data_layer=layer))
        for layers, begin, end in messages(parts, overlapped, STILL):
            text = " ".join(f"g{layer}" for layer in layers)
            rows.append(group([
                box(begin, top + 44, end - begin, 42, ORANGE, "white", stroke_width=2),
                words((begin + end) / 2, top + 71, text if len(layers) < 4 else "all", 17),
            ], class_="message", data_layers=text))
            ends[name] = end
        rows.append(line(ends[name], top - 4, ends[name], top + 92, "black", 4, class_="end"))
        drawn.append(group(rows, class_="way", data_name=name))
    first = min(ends, key=ends.get)
    drawn.insert(0, group([  # behind the messages
        line(ends[first], 56, ends[first], 510, "black", 2, stroke_dasharray="5 4"),
        words(ends[first] + 10, 56 + 112 * list(ends).index(first) + 28, f"{first} ends first",
              anchor="start", bold=True),
    ], class_="first", data_name=first))
    drawn.append(arrow(LEFT, 510, 632, 510, "black", 2))
    drawn.append(words(610, 536, "time"))
    drawn.append(words(LEFT, 536, "above: backward pass; below: messages", anchor="start"))
    return page(640, 550, "A backward pass of four layers, and four ways to send its gradients", (
        "Naive sends four messages after the pass. Flat sends one large message after the pass. "
        "Overlapped sends four messages, each as soon as its layer's gradients are there. "
        "Buckets sends two, the first of them while the pass goes on, and ends first."), drawn)


# ---- Messages in another order ----

GRADIENTS = [{"upper": 10, "lower": 1}, {"upper": 0, "lower": 2}]  # of each rank
ORDERS = {"the same order": [("upper", "lower"), ("upper", "lower")],
          "another order": [("upper", "lower"), ("lower", "upper")]}
PLACES = ["1st message", "2nd message"]


def draw_crossed():
    """Deeper, DDP's cases: messages are added up by their place in the order."""
    drawn = [words(320, 32, "Messages meet by their place, not by name", 22, bold=True)]
    for row, (name, orders) in enumerate(ORDERS.items()):
        top = 62 + 190 * row
        parts = [words(8, top + 14, name, 18, anchor="start", bold=True)]
        for rank in range(2):
            parts.append(words(8, top + 52 + 50 * rank, f"rank {rank} sends", anchor="start"))
        parts.append(words(8, top + 154, "both get", anchor="start"))
        for place in range(2):
            left = 158 + 240 * place
            parts.append(words(left + 105, top + 14, PLACES[place]))
            total = 0
            sent = []
            for rank, order in enumerate(orders):
                gradient = order[place]
                sent.append(gradient)
                value = GRADIENTS[rank][gradient]
                total += value
                blue = gradient == "upper"
                parts.append(group([
                    box(left, top + 26 + 50 * rank, 210, 42, BLUE if blue else ORANGE, "white",
                        stroke_width=2),
                    words(left + 105, top + 53 + 50 * rank, f"{gradient}: {value}",
                          fill="white" if blue else "black", bold=True),
                ], class_="message", data_rank=rank, data_place=place, data_gradient=gradient,
                    data_value=value))
            mixed = sent[0] != sent[1]
            parts.append(group([
                box(left, top + 128, 210, 42, "white" if mixed else PALE_GREY, "black",
                    stroke_width=3, stroke_dasharray="7 5" if mixed else "none"),
                words(left + 105, top + 155, f"{total}, mixed" if mixed else f"{sent[0]}: {total}",
                      bold=True),
            ], class_="sum", data_place=place, data_value=total))
        drawn.append(group(parts, class_="orders", data_name=name))
    return page(640, 440, "Two messages of two ranks, in the same order and in another", (
        "In the same order upper meets upper, 10 + 0, and lower meets lower, 1 + 2. Where rank 1 "
        "sends lower before upper, rank 0's upper meets rank 1's lower, and both get 12; then "
        "both get 1. These sums mix two gradients."), drawn)


DRAWINGS = {"ddp_buckets": draw_buckets, "ddp_crossed": draw_crossed, "ddp_ways": draw_ways}

if __name__ == "__main__":
    write(DRAWINGS)
