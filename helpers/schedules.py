"""All-reduces written down as messages, and the judge that says whether one is right.

Chapter 03 uses the judge, and one of its optional notebooks the judge's arrays and calls. A
*schedule* is a list of rounds, a round a list of messages that can be sent at the same time.
"""

from typing import NamedTuple
from unittest import mock

import mxnet as mx
import numpy as np
from mxnet import nd

ADD = "add"
COPY = "copy"


class Message(NamedTuple):
    """One piece of an array, from one rank to another."""

    sender: int  # a rank: a place in the list of arrays
    receiver: int
    chunk: int  # which piece of the array; 0 where arrays aren't cut
    what: str  # ADD: the receiver adds it to its own; COPY: it overwrites its own


def window(array, chunk, num_chunks):
    """The entries of one of `num_chunks` chunks, in the array's own memory, cut as a batch is."""
    flat = array.reshape(-1)
    size = flat.size // num_chunks
    longer = flat.size % num_chunks
    begin = chunk * size + min(chunk, longer)
    end = begin + size
    if chunk < longer:
        end += 1
    return flat[begin:end]


def run(rounds, arrays, num_chunks):
    """Carry out a schedule on k `mx.nd` arrays, one a device, in place."""
    for messages in rounds:
        for message in messages:
            source = window(arrays[message.sender], message.chunk, num_chunks)
            target = window(arrays[message.receiver], message.chunk, num_chunks)
            if source.size == 0:
                continue  # more chunks than entries
            if message.what == ADD:
                target += source.copyto(target.context)
            else:
                source.copyto(target)


def star(k):
    """All send to rank 0, one after the other, and it sends the sum to all. Uncut arrays."""
    rounds = []
    for rank in range(1, k):
        rounds.append([Message(sender=rank, receiver=0, chunk=0, what=ADD)])
    for rank in range(1, k):
        rounds.append([Message(sender=0, receiver=rank, chunk=0, what=COPY)])
    return rounds


def tree_up(k):
    """Pairs add up at the same time, then pairs of pairs, until rank 0 has the sum."""
    rounds = []
    gap = 1
    while gap < k:
        messages = []
        for receiver in range(0, k, 2 * gap):
            sender = receiver + gap
            if sender < k:
                messages.append(Message(sender, receiver, chunk=0, what=ADD))
        rounds.append(messages)
        gap = 2 * gap
    return rounds


def answer(message):
    """The message that goes back the same way, and overwrites."""
    return Message(message.receiver, message.sender, message.chunk, what=COPY)


def tree(k):
    """Up a tree, and the sum back. Uncut arrays."""
    up = tree_up(k)
    down = []
    for messages in reversed(up):
        down.append([answer(message) for message in messages])
    return up + down


def ring(k):
    """Once round a ring, adding; once more, with the whole sums. Arrays in k chunks."""
    rounds = []
    for number in range(1, k):
        messages = []
        for chunk in range(k):
            sender = (chunk + number) % k
            messages.append(Message(sender, (sender + 1) % k, chunk, ADD))
        rounds.append(messages)
    for number in range(k, 2 * k - 1):
        messages = []
        for chunk in range(k):
            sender = (chunk + number) % k
            messages.append(Message(sender, (sender + 1) % k, chunk, COPY))
        rounds.append(messages)
    return rounds


# ---- The judge ----

eight = [mx.cpu(rank) for rank in range(8)]  # being right needs no speed
backwards = list(reversed(eight))

NUMBERS = nd.arange(65, 77)
BIG_NUMBERS = nd.arange(4, dtype="float64").reshape((2, 2)) + 2**25


def wrong_ranks(candidate, arrays):
    """The ranks whose array doesn't hold the sum of all afterwards."""
    expected = 0
    for array in arrays:
        expected = expected + array.asnumpy()

    candidate(list(arrays))  # a list of its own, with the same arrays

    wrong = []
    for rank, array in enumerate(arrays):
        if not np.array_equal(array.asnumpy(), expected):
            wrong.append(rank)
    return wrong


def replicas(k, numbers=NUMBERS, order=eight):
    """An array for each of k devices: the numbers times 3 to the rank, plus 1/32.

    The sum says how often each device was counted, up to twice, and where each entry went. The
    1/32 is too fine for float16 and for integers, and makes no array a multiple of another.
    """
    arrays = []
    for rank in range(k):
        array = 3**rank * numbers + 1 / 32
        arrays.append(array.copyto(order[rank]))
    return arrays


def wrong_devices(candidate, k):
    """The ranks that don't hold the sum after one of 18 calls of `candidate` on k devices."""
    wrong = set()
    for call in range(3):  # an all-reduce must work more than once
        for order in [eight, backwards]:  # whichever device comes first
            for numbers in [NUMBERS, NUMBERS.reshape((3, 4)), BIG_NUMBERS]:
                arrays = replicas(k, numbers + call, order)
                wrong.update(wrong_ranks(candidate, arrays))
    return sorted(wrong)


def judge(candidate):
    """Raise AssertionError if `candidate` is wrong on 1 to 8 devices; print that it passes."""
    for k in range(1, 9):
        wrong = wrong_devices(candidate, k)
        assert wrong == [], f"wrong on {k} devices, ranks {wrong}"
    print(f"{candidate.__name__} passes on 1 to 8 devices")


# ---- What an all-reduce sends ----

copyto = nd.NDArray.copyto


def messages_sent(all_reduce, k, entries):
    """(sender, receiver, entries) of each copy to another device."""
    messages = []

    def noted(array, other):
        device = getattr(other, "context", other)  # of an array, or a device itself
        if device != array.context:  # a copy to itself is no message
            messages.append((array.context.device_id, device.device_id, array.size))
        return copyto(array, other)

    arrays = [nd.ones(entries, ctx=device) for device in eight[:k]]
    with mock.patch.object(nd.NDArray, "copyto", noted):
        all_reduce(arrays)
    return messages
