"""Judges solutions that are known to do no harm: no walls, no process of their own.

Each is judged in a fork of this process, in which MXNet is loaded already, by the judge's own code
over the judge's own messages; only that the solution answers from a thread is different. It takes
a tenth of the time of a real one.
"""

import contextlib
import faulthandler
import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path

os.environ["COURSE_SIMULATE"] = "1"
MARKING = Path(__file__).resolve().parents[2] / "notebooks/assignments/marking"
sys.path[:0] = [str(MARKING.parent), str(MARKING)]  # solution.py finds `channel` beside it

import helpers  # noqa: F401, E402  before mxnet, which reads its settings once
import mxnet  # noqa: F401, E402  once for all forks
with contextlib.suppress(ImportError):
    import backend  # noqa: F401  with PyTorch
import solution  # noqa: E402
from marking import assignment, judge, process  # noqa: E402
from marking.channel import Channel, Unreadable  # noqa: E402

WORK = 60      # seconds of work for one solution: far more than any takes that ends
SECONDS = 300  # by the clock: other programs may be at work too


class Process:
    """What `judge.judge_exercise` knows of a process, with a thread at the other end; where there
    are ranks, with processes."""

    def __init__(self, ranks):
        pairs = [socket.socketpair() for _ in range(ranks)]
        self.lines = [Connection(mine) for mine, _ in pairs]
        ends = [its for _, its in pairs]
        if ranks == 1:
            threading.Thread(target=serve, args=[ends], daemon=True).start()
        elif os.fork() == 0:
            for line in self.lines:
                line.channel.close()
            try:
                serve(ends)
            finally:
                os._exit(0)
        else:
            for end in ends:
                end.close()

    def start_clock(self):
        pass

    def describe_output(self):
        return ""


def serve(ends):
    with contextlib.suppress(EOFError):
        solution.serve([solution.channel.Channel(end) for end in ends], {"__name__": "__main__"})


class Connection:
    def __init__(self, mine):
        self.channel = Channel(mine)

    def send(self, tree):
        try:
            self.channel.send(tree)
        except OSError:
            raise process.Ended("its thread ended by itself") from None

    def receive(self):
        try:
            return self.channel.receive()
        except EOFError:
            raise process.Ended("its thread ended by itself") from None
        except Unreadable as error:
            raise process.Ended(str(error)) from None

    def end(self, why):
        raise process.Ended(why)


def judge_cell(name, exercise, answer):
    """The marks of one solution cell, in this process and its forks."""
    read = assignment.read_assignment(name)
    (one,) = (e for e in read.exercises if e.name == exercise)
    return judge.judge_exercise(read, one, [judge.Cell(exercise, answer, one.given)],
                                assignment.load_tests(name), Process(one.ranks))


def judge_all(jobs, workers=2):
    """{key: marks} for {key: (assignment, exercise, answer)}; None where it did not end after
    WORK seconds. `workers` forks at a time."""
    waiting, running, done = list(jobs.items()), {}, {}
    with selectors.DefaultSelector() as ready:
        while waiting or running:
            while waiting and len(running) < workers:
                key, job = waiting.pop(0)
                assignment.read_assignment(job[0])   # before the fork: once for all
                end, pid = _fork(job)
                running[end] = key, pid, time.monotonic() + SECONDS, []
                ready.register(end, selectors.EVENT_READ)
            for event, _ in ready.select(1):
                piece = os.read(event.fd, 2**16)
                running[event.fd][3].append(piece)
                if not piece:
                    _finish(event.fd, running, done, ready)
            for end, (_, pid, deadline, _) in list(running.items()):
                if time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)
                    _finish(end, running, done, ready)
    return done


def _fork(job):
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        return read, pid
    os.setpgid(0, 0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(quiet, standard)
    faulthandler.disable()   # a solution may crash
    resource.setrlimit(resource.RLIMIT_CPU, (WORK, WORK))
    try:
        with os.fdopen(write, "w") as stream:
            json.dump(judge_cell(*job), stream)
    finally:
        os.killpg(0, signal.SIGKILL)   # its ranks too


def _finish(end, running, done, ready):
    key, pid, _, pieces = running.pop(end)
    ready.unregister(end)
    os.close(end)
    os.waitpid(pid, 0)
    text = b"".join(pieces)
    done[key] = [judge.Mark(*mark) for mark in json.loads(text)] if text else None
