"""All-reduces written down as messages, and the judge that says whether one is right.

Chapter 03 builds all of this; its deeper notebook goes on with it. A test holds each function here
equal to the chapter's. A *schedule* is a list of rounds, a round a list of messages that can be
sent at the same time.
"""

from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd

from helpers.parallel import send, send_into

ADD = "add"
COPY = "copy"


class Message(NamedTuple):
    """One piece of an array, from one rank to another."""

    sender: int  # a rank: a place in the list of arrays
    receiver: int
    chunk: int  # which piece of the array; 0 where arrays aren't cut
    what: str  # ADD: the receiver adds it to its own; COPY: it overwrites its own


def window(array, chunk, num_chunks):
    """The entries of one of `num_chunks` nearly equal chunks, in the array's own memory."""
    flat = array.reshape(-1)
    begin = flat.size * chunk // num_chunks
    end = flat.size * (chunk + 1) // num_chunks
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
                target += send(source, target.context)
            else:
                send_into(source, target)


def partner_of(rank, gap):
    """Who exchanges with `rank`: for a gap of 1 0 and 1, 2 and 3; of 2 0 and 2, 1 and 3."""
    if rank % (2 * gap) < gap:
        return rank + gap
    else:
        return rank - gap


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
        for rank in range(0, k, 2 * gap):
            if rank + gap < k:
                messages.append(Message(sender=rank + gap, receiver=rank, chunk=0, what=ADD))
        rounds.append(messages)
        gap = 2 * gap
    return rounds


def answer(message):
    """The message that goes back the same way, and overwrites."""
    return Message(sender=message.receiver, receiver=message.sender, chunk=message.chunk, what=COPY)


def tree(k):
    """Up a tree, and the sum back. Uncut arrays."""
    up = tree_up(k)
    down = []
    for messages in reversed(up):
        down.append([answer(message) for message in messages])
    return up + down


def reduce_scatter(k):
    """Once round a ring: rank r has the sum of chunk r. Arrays in k chunks."""
    rounds = []
    for step in range(k - 1):
        messages = []
        for rank in range(k):
            following = (rank + 1) % k
            chunk = (rank - 1 - step) % k
            messages.append(Message(sender=rank, receiver=following, chunk=chunk, what=ADD))
        rounds.append(messages)
    return rounds


def all_gather(k):
    """Once round a ring: chunk r of rank r reaches all. Arrays in k chunks."""
    rounds = []
    for step in range(k - 1):
        messages = []
        for rank in range(k):
            following = (rank + 1) % k
            chunk = (rank - step) % k
            messages.append(Message(sender=rank, receiver=following, chunk=chunk, what=COPY))
        rounds.append(messages)
    return rounds


def ring(k):
    """Reduce-scatter, then all-gather. Arrays in k chunks."""
    return reduce_scatter(k) + all_gather(k)


# ---- The judge ----

eight = [mx.cpu(rank) for rank in range(8)]  # being right needs no speed
backwards = list(reversed(eight))

NUMBERS = nd.arange(65, 77)
BIG_NUMBERS = nd.arange(4, dtype="float64").reshape((2, 2)) + 2**25


def wrong_ranks(all_reduce, arrays):
    """The ranks whose array doesn't hold the sum of all afterwards."""
    expected = 0
    for array in arrays:
        expected = expected + array.asnumpy()

    all_reduce(list(arrays))  # another list, with the same arrays in it

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


def wrong_devices(all_reduce, k):
    """The ranks that don't hold the sum after one of six calls of `all_reduce` on k devices."""
    calls = [
        replicas(k, NUMBERS, eight),
        replicas(k, NUMBERS + 1, backwards),  # another device comes first
        replicas(k, NUMBERS + 2, eight),  # not the first time any more
        replicas(k, BIG_NUMBERS, eight),  # float64, and a matrix
        replicas(k, BIG_NUMBERS + 1, backwards),
        replicas(k, BIG_NUMBERS + 2, eight),
    ]
    wrong = set()
    for arrays in calls:
        wrong.update(wrong_ranks(all_reduce, arrays))
    return sorted(wrong)
