"""The drawings of chapter 03 and of the deeper notebook on all-reduces.

Run it to write six SVG files beside it, the same bytes each time.
"""

from typing import NamedTuple

from elements import (
    BLUE, DARK_GREEN, FRAME, GREY, LIGHT_GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_GREY,
    PALE_ORANGE, arrow, box, element, group, line, page, words, write,
)

PARTS = (PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_GREY)  # of each device's part of a sum
NAMES = "abcd"  # of these parts
ADD, COPY = "add", "copy"  # what a receiver does: add the message to its own, or overwrite
DEVICES = 4


# ---- What happens: messages, round by round ----


class Message(NamedTuple):
    """One message; `chunk` is None where the whole array is sent."""

    sender: int
    receiver: int
    chunk: int | None
    what: str


def star_rounds():
    """Everyone sends to device 0, one at a time; then device 0 sends to everyone."""
    rounds = []
    for rank in range(1, DEVICES):
        rounds.append([Message(rank, 0, None, ADD)])
    for rank in range(1, DEVICES):
        rounds.append([Message(0, rank, None, COPY)])
    return rounds


def tree_rounds():
    """Up a tree with root 0 and down again."""
    return [
        [Message(1, 0, None, ADD), Message(3, 2, None, ADD)],
        [Message(2, 0, None, ADD)],
        [Message(0, 2, None, COPY)],
        [Message(0, 1, None, COPY), Message(2, 3, None, COPY)],
    ]


def ring_rounds():
    """Reduce-scatter, after which device r has the sum of chunk r; then all-gather."""
    rounds = []
    for step in range(DEVICES - 1):
        messages = []
        for rank in range(DEVICES):
            chunk = (rank - step - 1) % DEVICES
            messages.append(Message(rank, (rank + 1) % DEVICES, chunk, ADD))
        rounds.append(messages)
    for step in range(DEVICES - 1):
        messages = []
        for rank in range(DEVICES):
            chunk = (rank - step) % DEVICES
            messages.append(Message(rank, (rank + 1) % DEVICES, chunk, COPY))
        rounds.append(messages)
    return rounds


def halving_rounds():
    """Partners one apart, then two apart, send what the other keeps; then the same way back."""
    halving = []
    for gap in (1, 2):
        messages = []
        for rank in range(DEVICES):
            partner = rank ^ gap
            for chunk in range(DEVICES):
                if chunk % (2 * gap) == partner % (2 * gap):
                    messages.append(Message(rank, partner, chunk, ADD))
        halving.append(messages)
    doubling = []
    for messages in reversed(halving):
        doubling.append([Message(sent.receiver, sent.sender, sent.chunk, COPY)
                         for sent in messages])
    return halving + doubling


def ring_states():
    """The states of a ring."""
    return states_of(ring_rounds())


def states_of(rounds):
    """For the start and after each round: `{(device, chunk): parts in its sum}`."""
    now = {}
    for device in range(DEVICES):
        for chunk in range(DEVICES):
            now[device, chunk] = {device}
    states = [now]
    for messages in rounds:
        before, now = now, dict(now)  # all messages of a round leave at once
        for message in messages:
            sent = before[message.sender, message.chunk]
            if message.what == ADD:
                sent = sent | before[message.receiver, message.chunk]
            now[message.receiver, message.chunk] = sent
        states.append(now)
    return states


# ---- The drawings ----

def draw_array(x, y, value, new=False):
    """An array of which we show one number."""
    if new:
        frame = box(x - 25, y, 50, 44, PALE_ORANGE, ORANGE, stroke_width=4, stroke_dasharray="7 4")
    else:
        frame = box(x - 25, y, 50, 44, PALE_BLUE, BLUE, stroke_width=3)
    return group([frame, words(x, y + 31, str(value), 24, bold=True)],
                 class_="array", data_value=value, data_new="yes" if new else "no")


def draw_names(left, parameter):
    """The three slots of the list, and the three parameters, of one panel."""
    drawn = []
    for slot in range(3):
        x = left + 80 * slot
        drawn.append(box(x - 35, 106, 70, 40, "white", "black", stroke_width=2))
        drawn.append(words(x, 132, f"[{slot}]"))
        drawn.append(box(x - 35, parameter, 70, 40, PALE_GREY, "black", stroke_width=2, rx=12))
        drawn.append(words(x, parameter + 26, f"cpu({slot})", 17))
    return drawn


def draw_rebinding():
    """Chapter 03: an all-reduce that changes the list and not what the parameters hold."""
    new, old, parameter = 192, 278, 364
    before, after = 150, 425
    drawn = [words(320, 32, "The list has the sum, two of the parameters don't", 22, bold=True),
             words(before + 80, 82, "before", 20), words(after + 80, 82, "after", 20),
             line(367, 62, 367, 420, GREY, 1)]
    for y, text in ((132, "the list"), (new + 28, "new arrays"), (old + 28, "old arrays"),
                    (390, "parameters")):
        drawn.append(words(8, y, text, anchor="start"))
    drawn += draw_names(before, parameter)
    drawn += draw_names(after, parameter)
    for slot in range(3):
        x = before + 80 * slot
        drawn.append(draw_array(x, old, slot + 1))
        drawn.append(arrow(x, 146, x, old - 4))
        drawn.append(arrow(x, parameter, x, old + 48))
    for slot in range(3):
        x = after + 80 * slot
        drawn.append(draw_array(x, old, 6 if slot == 0 else slot + 1))
        drawn.append(arrow(x, parameter, x, old + 48))
        if slot == 0:
            drawn.append(arrow(x, 146, x, old - 4))
        else:
            drawn.append(draw_array(x, new, 6, new=True))
            drawn.append(arrow(x, 146, x, new - 4))
    return page(640, 430, "The list has the sum, two of the parameters don't",
                "Before: the three slots of the list, and three parameters, point to the same "
                "three arrays, 1, 2 and 3. After: slot 0 and its parameter point to the old array, "
                "now 6. Slots 1 and 2 point to new arrays, 6, but the parameters still hold 2 and "
                "3.",
                drawn)


CORNERS = ((0, 0), (52, 0), (52, 52), (0, 52))  # of devices 0 to 3, so that a ring is a square


def draw_round(x, y, messages, width):
    """The four devices in one round: those at work are dark, and an arrow is a message."""
    working = set()
    drawn = [box(x - 16, y - 16, 84, 84, PALE_GREY, "none", rx=14)]
    for message in messages:
        working |= {message.sender, message.receiver}
        (x1, y1), (x2, y2) = CORNERS[message.sender], CORNERS[message.receiver]
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        right, down = 13 * (x2 - x1) / length, 13 * (y2 - y1) / length  # to the circle's edge
        drawn.append(arrow(x + x1 + right, y + y1 + down, x + x2 - right, y + y2 - down, "black",
                           width, class_=f"message {message.what}"))
    for device, (right, down) in enumerate(CORNERS):
        fill, ink = (BLUE, "white") if device in working else ("white", FRAME)
        drawn.append(element("circle", cx=x + right, cy=y + down, r=12, fill=fill,
                             stroke=BLUE if device in working else LIGHT_GREY, stroke_width=2))
        drawn.append(words(x + right, y + down + 6, str(device), 17, bold=True, fill=ink))
    return group(drawn, class_="round")


def draw_star_tree_ring():
    """Chapter 03: who works in each round of three all-reduces."""
    title = "Three all-reduces: the ring keeps all devices busy"
    drawn = [words(320, 32, title, 22, bold=True)]
    for number in range(6):
        drawn.append(words(50 + 88 * number, 70, f"round {number + 1}"))
    ways = (("star", star_rounds(), 1, "whole arrays (S), all through device 0"),
            ("tree", tree_rounds(), 1, "whole arrays (S), in pairs"),
            ("ring", ring_rounds(), DEVICES, "quarters (S/4), each device sends one"))
    for row, (name, rounds, pieces, text) in enumerate(ways):
        y = 130 + 138 * row
        way = [words(8, y - 28, name, 20, "start", bold=True),
               words(64, y - 28, text, anchor="start")]
        for number, messages in enumerate(rounds if pieces == 1 else rounds[:1]):
            way.append(draw_round(24 + 88 * number, y, messages, 8 / pieces))
        if pieces > 1:  # each round has the same arrows
            way.append(arrow(106, y + 26, 148, y + 26, FRAME, 3))
            way.append(words(160, y + 33, f"the same in all {len(rounds)} rounds", 20, "start",
                             class_="repeated"))
        size = "S" if pieces == 1 else f"S/{pieces}"
        cost = [f"{len(rounds)} rounds", f"× {size}"]
        if pieces > 1:
            cost.append(f"= {len(rounds) / pieces:g} S")
        for number, text in enumerate(cost):
            way.append(words(586, y + 24 + 26 * number - 12 * (pieces > 1), text, 20, bold=True,
                             class_="cost"))
        drawn.append(group(way, class_="way", data_name=name))
    return page(640, 484, title,
                "Three rows of four devices, 0 to 3, a column for each round; a device that sends "
                "or receives is dark. Star: in each of 6 rounds a thick arrow to or from device 0, "
                "and two devices wait; 6 times S. Tree: 4 rounds of thick arrows, two in the first "
                "and in the last round, one in those between; 4 times S. Ring: one panel, the same "
                "in all 6 rounds: all devices work, and each sends a thin arrow, a quarter, to the "
                "next; 6 times S/4, which is 1.5 S.", drawn)


PITCH = 54  # from one device of a grid to the next


def draw_state(x, y, number, state):
    """The grid of sums after a round: rows are devices, columns are chunks, arrows are messages."""
    wide, high = 58, 34
    messages = ring_rounds()[number - 1] if number > 0 else []
    received = {(message.receiver, message.chunk) for message in messages}
    drawn = [words(x + 2 * wide, y - 50, "start" if number == 0 else f"after round {number}", 20,
                   bold=True)]
    for chunk in range(DEVICES):
        drawn.append(words(x + wide * (chunk + 0.5), y - 24, str(chunk), 17))
    for device in range(DEVICES):
        for chunk in range(DEVICES):
            left, top = x + wide * chunk, y + PITCH * device
            new = (device, chunk) in received
            total = str(sum(10**part for part in state[device, chunk]))
            drawn.append(group([
                box(left, top, wide, high, PALE_BLUE if new else "white", FRAME),
                words(left + wide / 2, top + 24, total, 19, bold=new),
            ], class_="cell", data_device=device, data_chunk=chunk,
                data_received="yes" if new else "no"))
    for message in messages:
        middle, top = x + wide * (message.chunk + 0.5), y + PITCH * message.receiver
        drawn.append(arrow(middle, top - PITCH + high, middle, top, BLUE, 3, class_="message",
                           data_receiver=message.receiver, data_chunk=message.chunk))
        if message.sender > message.receiver:  # from the last device to the first
            below = y + PITCH * message.sender + high
            drawn.append(arrow(middle, below, middle, below + 20, BLUE, 3))
            side, anchor = (12, "start") if message.chunk < 2 else (-12, "end")
            drawn.append(words(middle + side, below + 17, "to device 0", 17, anchor))
    return group(drawn, class_="state", data_round=number)


def draw_ring_rounds():
    """Chapter 03: the sums after each round of a reduce-scatter."""
    states = ring_states()
    left, right = 84, 376
    upper, lower = 128, 434
    title = "After three rounds, each device has one whole sum"
    drawn = [words(312, 32, title, 22, bold=True)]
    for number, x, y in ((0, left, upper), (1, right, upper), (2, left, lower), (3, right, lower)):
        drawn.append(draw_state(x, y, number, states[number]))
    for y in (upper, lower):
        drawn.append(words(left - 8, y - 24, "chunk", 17, "end"))
        for device in range(DEVICES):
            drawn.append(words(left - 8, y + PITCH * device + 23, f"device {device}", 17, "end"))
    return page(624, 656, title,
                "Grids of four devices by four chunks. Device r starts with 10 to the r in each "
                "chunk. In each of three rounds one chunk of each device gains what the device "
                "above holds, and the device above device 0 is device 3. Arrows lead from each "
                "sent number to the one that grows. After round 3 the numbers on the diagonal are "
                "1111.", drawn)


def draw_halving_state(x, y, number, state):
    """The grid of sums after a round of halving and doubling; what a device gave away is empty.

    At its left brackets join the partners of the round.
    """
    wide, high = HALVING_CELL
    received, kept = set(), set(state)
    if number > 0:
        messages = halving_rounds()[number - 1]
        received = {(message.receiver, message.chunk) for message in messages}
    if number in (1, 2):
        kept = received
    elif number == 3:
        kept = received | {(device, device) for device in range(DEVICES)}
    drawn = [words(x + 2 * wide, y - 36, "start" if number == 0 else f"after round {number}", 20,
                   bold=True)]
    for chunk in range(DEVICES):
        drawn.append(words(x + wide * (chunk + 0.5), y - 9, str(chunk), 17))
    for device in range(DEVICES):
        for chunk in range(DEVICES):
            left, top = x + wide * chunk, y + high * device
            place = (device, chunk)
            fill = PALE_BLUE if place in received else "white" if place in kept else PALE_GREY
            cell = [box(left, top, wide, high, fill, FRAME)]
            if place in kept:
                total = str(sum(10**part for part in state[place]))
                cell.append(words(left + wide / 2, top + 25, total, 17, bold=place in received))
            drawn.append(group(cell, class_="cell", data_device=device, data_chunk=chunk,
                               data_received="yes" if place in received else "no",
                               data_kept="yes" if place in kept else "no"))
    if number > 0:
        partners = {tuple(sorted((message.sender, message.receiver))) for message in messages}
        for place, (first, second) in enumerate(sorted(partners)):
            deep = 18 if place == 1 and first == 1 else 10  # the second crosses the first
            drawn.append(bracket(x - 3, deep, y + high * (first + 0.5), y + high * (second + 0.5),
                                 data_partners=f"{first} {second}"))
    return group(drawn, class_="state", data_round=number)


HALVING_CELL = 41, 36


def bracket(x, deep, top, bottom, **attributes):
    """It joins two rows at their left."""
    return element("polyline", points=f"{x},{top:g} {x - deep},{top:g} {x - deep},{bottom:g} "
                   f"{x},{bottom:g}", fill="none", stroke=DARK_GREEN, stroke_width=3,
                   class_="bracket", **attributes)


def draw_halving():
    """Deeper: four devices halve what they keep, twice, and then double it."""
    states = states_of(halving_rounds())
    lefts, tops = (92, 282, 472), (112, 356)
    drawn = [words(320, 32, "Two rounds halve what a device keeps, two double it", 22, bold=True)]
    for number, column, row in ((0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 1, 1), (4, 2, 1)):
        drawn.append(draw_halving_state(lefts[column], tops[row], number, states[number]))
    for right, top in zip((74, 254), tops):
        drawn.append(words(right, top - 9, "chunk", 17, "end"))
        for device in range(DEVICES):
            drawn.append(words(right, top + 36 * device + 25, f"device {device}", 17, "end"))
    for row, (fill, text) in enumerate(((PALE_BLUE, "just received"), (PALE_GREY, "given away"))):
        y = tops[1] + 16 + 40 * row
        drawn.append(box(10, y, 28, 22, fill, FRAME))
        drawn.append(words(48, y + 17, text, 18, "start"))
    drawn.append(bracket(30, 10, tops[1] + 96, tops[1] + 120))
    drawn.append(words(48, tops[1] + 114, "partners", 18, "start"))
    return page(640, 520, "Halving and doubling on four devices, round by round",
                "Grids of four devices by four chunks. Device r starts with 10 to the r in each "
                "chunk. In round 1 devices 0 and 1, and 2 and 3, swap halves: 0 and 2 keep chunks "
                "0 and 2, 1 and 3 keep chunks 1 and 3. In round 2 devices 0 and 2, and 1 and 3, "
                "swap half of that, and the diagonal is 1111. In rounds 3 and 4 the sums go back "
                "the same way, to two chunks and then to all four.", drawn)


def whole_cell(x, y, size, parts, **attributes):
    """A chunk that is one device's own, or the sum of all; an empty one doesn't matter."""
    if not parts:
        return group([box(x, y, size, size, "white", LIGHT_GREY)], **attributes)
    if len(parts) == DEVICES:
        fill, text, bold = "white", "Σ", True
    else:
        (part,) = parts
        fill, text, bold = PARTS[part], NAMES[part], False
    return group([box(x, y, size, size, fill, FRAME),
                  words(x + size / 2, y + size / 2 + 6.5, text, 20, bold=bold)], **attributes)


def draw_grid(x, y, cells):
    """Four devices by four chunks; what doesn't matter is empty."""
    drawn = []
    for matters in (False, True):  # those that matter above their neighbours
        for device in range(DEVICES):
            for chunk in range(DEVICES):
                parts = cells.get((device, chunk), set())
                if bool(parts) == matters:
                    drawn.append(whole_cell(x + 25 * chunk, y + 30 * device, 25, parts,
                                            class_="cell", data_device=device, data_chunk=chunk))
    return group(drawn, class_="grid")


def collectives():
    """`{names: grids}`: an all-reduce, and the two chains that do the same."""
    everyone = set(range(DEVICES))
    own, first, diagonal, all_ = {}, {}, {}, {}
    for device in range(DEVICES):
        for chunk in range(DEVICES):
            own[device, chunk] = {device}
            all_[device, chunk] = everyone
        first[0, device] = everyone
        diagonal[device, device] = everyone
    return {("all-reduce",): (own, all_),
            ("reduce", "broadcast"): (own, first, all_),
            ("reduce-scatter", "all-gather"): (own, diagonal, all_)}


def draw_collectives():
    """Chapter 03: an all-reduce, and the two pairs of collectives that make one."""
    title = "Two ways to make an all-reduce in two steps"
    drawn = [words(320, 32, title, 22, bold=True),
             words(4, 72, "each device's own", anchor="start"),
             words(634, 72, "Σ = a + b + c + d", anchor="end")]
    for row, (names, grids) in enumerate(collectives().items()):
        y = 92 + 160 * row
        chain = [words(26, y + 30 * device + 20, str(device), anchor="end", size=17)
                 for device in range(DEVICES)]
        lefts = [34 + 500 * number / len(names) for number in range(len(grids))]
        for x, cells in zip(lefts, grids):
            chain.append(draw_grid(x, y, cells))
        for begin, end, name in zip(lefts, lefts[1:], names):
            chain.append(arrow(begin + 108, y + 64, end - 8, y + 64, "black", 3))
            chain.append(words((begin + 100 + end) / 2, y + 50, name, 18, bold=True, class_="name"))
        drawn.append(group(chain, class_="chain"))
    return page(640, 552, title,
                "Three chains of grids of four devices by four chunks, from each device's own "
                "numbers a, b, c and d to the sums on all devices. All-reduce: in one step. "
                "Reduce: device 0 gets all sums; broadcast: everyone gets device 0's array. "
                "Reduce-scatter: device r gets the sum of chunk r; all-gather: everyone gets every "
                "chunk.", drawn)


DRAWINGS = {
    "rebinding": draw_rebinding, "star_tree_ring": draw_star_tree_ring,
    "ring_rounds": draw_ring_rounds, "collectives": draw_collectives,
    "halving_doubling": draw_halving}

if __name__ == "__main__":
    write(DRAWINGS)
