"""The messages between a solution's processes, which the judge carries, checks and records.

A rank starts a message, goes on, and later waits for what comes of it: what the n-th messages of
all ranks make together. A message that not all ranks send, or not alike, is found as soon as nobody
can go on any more: no clock is needed for that.
"""

import threading
from typing import NamedTuple

import numpy as np

from marking.cases import Wrong

MOST = 2**28    # bytes that may be under way
KINDS = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"}
OPERATIONS = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}


class Message(NamedTuple):
    """One rank's part in a message: its kind, what it gives, and the operation or root rank."""

    kind: str
    arrays: list
    detail: str

    def __str__(self):
        what = "".join(f" of {a.dtype} {list(a.shape)}" for a in self.arrays[:1])
        where = f" from rank {self.detail}" if self.kind == "broadcast" else ""
        return self.kind + what + where

    @property
    def numbers(self):
        return sum(array.size for array in self.arrays)

    def describe(self):
        """What has to be the same on all ranks."""
        return self.kind, [(a.shape, a.dtype) for a in self.arrays], self.detail


class Sent(NamedTuple):
    """The record of a message: its kind, numbers and bytes that each rank gave."""

    kind: str
    numbers: int
    bytes: int


class Exchange:
    """The messages of one call on `world` ranks, which are threads here."""

    def __init__(self, world):
        self.world, self.change = world, threading.Condition()
        self.started = [[] for _ in range(world)]   # messages, None once everybody has got them
        self.record = [[] for _ in range(world)]    # a Sent for each
        self.taken = {}                             # message's number: ranks that have the result
        self.waiting = [None] * world               # a message's number, or "left"
        self.fault, self.told = None, set()         # what went wrong, and which ranks heard of it

    def start(self, rank, kind, arrays, detail):
        """Note a message; returns its number. Raises Wrong where it can be none."""
        message = Message(kind, arrays, detail)
        with self.change:
            self._check(rank)
            why = self._find_fault(message)
            if why:
                self._stop(rank, why)
            self.started[rank].append(message)
            self.record[rank].append(Sent(kind, message.numbers, sum(a.nbytes for a in arrays)))
            if sum(a.nbytes for line in self.started for one in line if one
                   for a in one.arrays) > MOST:
                self._stop(rank, f"more than {MOST // 2**20} MB of messages that nobody waits for")
            self.change.notify_all()
            return len(self.started[rank]) - 1

    def finish(self, rank, number):
        """Wait for message `number`; returns the arrays that come of it. Raises Wrong where
        it never will be."""
        with self.change:
            if not 0 <= number < len(self.started[rank]) or rank in self.taken.get(number, ()):
                raise Wrong("it waited for a message that it had not started")
            self.waiting[rank] = number
            self.change.notify_all()
            while not self._is_whole(number):
                self._check(rank)
                if self._is_stuck():
                    self._stop(rank, self._explain(number))
                self.change.wait()
            self._check(rank)
            self.waiting[rank] = None
            messages = [line[number] for line in self.started]
            if any(one.describe() != messages[0].describe() for one in messages):
                other = next(r for r, one in enumerate(messages)
                             if one.describe() != messages[0].describe())
                self._stop(rank, f"message {number + 1} is {messages[0]} on rank 0 and "
                                 f"{messages[other]} on rank {other}")
            result = combine(messages, rank)
            self.taken.setdefault(number, set()).add(rank)
            if len(self.taken[number]) == self.world:
                for line in self.started:
                    line[number] = None   # frees the arrays
            return result

    def leave(self, rank):
        """The rank's call is over."""
        with self.change:
            self.waiting[rank] = "left"
            self.change.notify_all()

    def count(self):
        """The record of all messages. Raises Wrong where ranks sent different numbers."""
        counts = [len(line) for line in self.record]
        if len(set(counts)) > 1:
            raise Wrong("the ranks sent different numbers of messages: "
                        f"{', '.join(map(str, counts))}")
        return self.record[0]

    def _find_fault(self, message):
        kind, arrays, detail = message
        if kind == "broadcast" and detail not in map(str, range(self.world)):
            return f"a broadcast from rank {detail[:20]}: there are ranks 0 to {self.world - 1}"
        if len(arrays) != {"reduce_scatter": self.world, "barrier": 0}.get(kind, 1) or (
                "reduce" in kind and detail not in OPERATIONS) or (
                len({(a.shape, a.dtype) for a in arrays}) > 1):
            return f"what it gave to {kind} makes no message"
        return None

    def _is_whole(self, number):
        return all(len(line) > number for line in self.started)

    def _is_stuck(self):
        return not any(at is None or at != "left" and self._is_whole(at) for at in self.waiting)

    def _explain(self, number):
        missing = [r for r, line in enumerate(self.started) if len(line) <= number]
        here = next(line[number] for line in self.started if len(line) > number)
        where = "has ended" if self.waiting[missing[0]] == "left" else "waits for an earlier one"
        return (f"message {number + 1}, {here}, never comes from rank {missing[0]}, "
                f"which {where}")

    def _check(self, rank):
        if self.fault:
            self.told.add(rank)
            raise Wrong(self.fault)

    def _stop(self, rank, why):
        self.fault = self.fault or why
        self.change.notify_all()
        self._check(rank)


def combine(messages, rank):
    """The arrays that `rank` gets when these are the messages of all ranks."""
    kind, arrays, detail = messages[rank]
    match kind:
        case "all_reduce":
            return [OPERATIONS[detail]([one.arrays[0] for one in messages], axis=0)
                    .astype(arrays[0].dtype)]
        case "broadcast":
            return messages[int(detail)].arrays
        case "all_gather":
            return [one.arrays[0] for one in messages]
        case "reduce_scatter":
            return [OPERATIONS[detail]([one.arrays[rank] for one in messages], axis=0)
                    .astype(arrays[0].dtype)]
    return []   # a barrier
