"""Measuring: contestants in turns, their spread, new processes, and who else used the machine."""

import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from typing import NamedTuple

import numpy as np
import psutil
from joblib.externals.loky import ProcessPoolExecutor

UNITS = {"s": 1, "ms": 1e3, "µs": 1e6}


def in_turns(contestants, rounds, warm_up=2, seed=0, quiet=None, wait=None):
    """Seconds that each contestant takes, one after the other, again and again.

    contestants: `{name: function without arguments}`. A round runs each of them once, in a random
    order, so that whatever disturbs the machine for a while hits all alike. The first `warm_up`
    rounds don't count. `wait` is called before the clock starts and before it stops, so that a
    contestant's own work is measured, and all of it; by default it is `mx.nd.waitall`.

    quiet: the largest share of the machine that others may use during a round, from 0 to 1. A
    round that was disturbed more is taken again, up to `rounds` more times in all. How many were
    left out is printed. If fewer than three were quiet (than `rounds`, where that is less), all are
    used, and that is printed.
    Systems count CPU time in steps of 10 ms: a round that is to be judged takes half a second or
    more.

    Returns `{name: array of seconds, one a round}`. Raises ValueError for no contestants, fewer
    than one round, or a negative warm_up.
    """
    if not contestants:
        raise ValueError("in_turns(contestants={}): needs at least one function to run")
    if rounds < 1:
        raise ValueError(f"in_turns(rounds={rounds}): needs at least one round")
    if warm_up < 0:
        raise ValueError(f"in_turns(warm_up={warm_up}): must be 0 or more")
    if wait is None:
        import mxnet as mx  # here: other frameworks' chapters measure too

        wait = mx.nd.waitall
    order = np.random.default_rng(seed)
    for _ in range(warm_up):
        _one_round(contestants, order, wait)
    kept, disturbed = [], []
    while len(kept) < rounds and len(kept) + len(disturbed) < 2 * rounds:
        with Others() as others:
            row = _one_round(contestants, order, wait)
        if quiet is None or others.share <= quiet:
            kept.append(row)
        else:
            disturbed.append(row)
    if disturbed and len(kept) >= min(rounds, 3):
        print(f"{len(disturbed)} of {len(kept) + len(disturbed)} rounds left out: "
              f"others used more than {quiet:.0%} of the machine")
    elif disturbed:
        print(f"only {len(kept)} of {len(kept) + len(disturbed)} rounds were quiet, so all are "
              f"used: others used more than {quiet:.0%} of the machine in the rest")
        kept += disturbed
    return {name: np.array([row[name] for row in kept]) for name in contestants}


def _one_round(contestants, order, wait):
    names = list(contestants)
    seconds = {}
    for place in order.permutation(len(names)):
        wait()
        begin = time.perf_counter()
        contestants[names[place]]()
        wait()
        seconds[names[place]] = time.perf_counter() - begin
    return seconds


class Spread(NamedTuple):
    """Quartiles and median of measured seconds: half of them lie from `low` to `high`."""

    low: float
    median: float
    high: float


def spread(seconds):
    """The `Spread` of an array of seconds. Raises ValueError for an empty one."""
    if np.size(seconds) == 0:
        raise ValueError("spread(seconds=[]): needs at least one number")
    return Spread(*np.percentile(seconds, (25, 50, 75)))


def print_times(times, unit="ms"):
    """One row a name: the median, and in brackets the quartiles, of `in_turns`' result.

    unit: "s", "ms" or "µs"; another is a ValueError.
    """
    if unit not in UNITS:
        raise ValueError(f"print_times(unit={unit!r}): must be one of {', '.join(UNITS)}")
    width = max(map(len, times), default=0)
    for name, seconds in times.items():
        low, median, high = (UNITS[unit] * value for value in spread(seconds))
        print(f"{name:{width}}  {median:7.4g} {unit}  ({low:.4g} to {high:.4g})")


def in_new_processes(function, arguments):
    """What `function(argument)` returns for each of `arguments`, each in a process of its own.

    One process after the other, so that none disturbs another. Functions of a notebook work too,
    since loky sends them by value. `helpers` is imported first, as a notebook does, so that MXNet
    finds its settings. What a process prints is dropped. Its error is raised here.
    """
    results = []
    for argument in arguments:
        pool = ProcessPoolExecutor(1, initializer=_prepare)
        try:
            results.append(pool.submit(_quietly, function, argument).result())
        finally:
            pool.shutdown(kill_workers=True)
    return results


class Team:
    """Programs that work at the same time when it is called, and wait in between.

    commands: the arguments of each program, as for `subprocess.Popen`; environment: their
    variables, this process's by default. A program reads a line, works, and answers with a line;
    so a team is a contestant for `in_turns`. It begins when each has printed that it is ready;
    `ready` has those lines.

    team() sends `order` to all, waits for all, and returns their answers. `close` ends them, and
    so does the end of a `with` block. Raises RuntimeError, with the last that it wrote to stderr,
    for a program that has ended.
    """

    def __init__(self, commands, order="", environment=None):
        self.order = order
        self._programs = []   # (program, file with what it wrote to stderr) of each
        try:
            for command in commands:
                # Not a pipe, which holds 64 KB: whoever writes more waits until it is read.
                words = tempfile.TemporaryFile("w+", errors="replace")
                program = subprocess.Popen(command, env=environment, text=True, stderr=words,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._programs.append((program, words))
            self.ready = self._answers()
        except BaseException:
            self.close()
            raise

    def __call__(self):
        for program, _ in self._programs:
            with suppress(BrokenPipeError):  # it has ended, and its answer says so
                print(self.order, file=program.stdin, flush=True)
        return self._answers()

    def _answers(self):
        lines = []
        for program, words in self._programs:
            line = program.stdout.readline()
            if not line:
                words.seek(0)
                raise RuntimeError(f"a program of the team ended: {words.read().strip()[-2000:]}")
            lines.append(line.strip())
        return lines

    def close(self):
        for program, words in self._programs:
            program.kill()
            program.communicate()
            words.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def race(programs, steps, rounds, environments=None):
    """Seconds that each program takes for so many steps, by `in_turns` with `quiet=0.02`.

    programs: `{name: command line}` of Python programs, such as "lenet_contestant.py --devices 0";
    of a list of them, all work at the same time. Each is a `Team` whose order is `steps`.
    environments: `{name: variables}` of those that don't have this process's.
    """
    with ExitStack() as stack:
        teams = {}
        for name, lines in programs.items():
            lines = [lines] if isinstance(lines, str) else lines
            team = Team([[sys.executable, *shlex.split(line)] for line in lines], str(steps),
                        (environments or {}).get(name))
            teams[name] = stack.enter_context(team)
        return in_turns(teams, rounds, quiet=0.02)


def _prepare():
    import helpers  # noqa: F401


def _quietly(function, argument):
    with redirect_stdout(StringIO()):
        return function(argument)


class Others:
    """What share of the machine's CPU time went to anybody else while a block ran.

    `with Others() as others: work()`, then `others.share`, from 0 to 1: the time of other
    programs and, on a virtual machine, time that its host gave to other guests (steal). Ours is
    what this process and those that it started used.
    """

    share = None

    def __enter__(self):
        self._start = self._read()
        return self

    def __exit__(self, *error):
        all_, busy, own = (b - a for a, b in zip(self._start, self._read()))
        self.share = min(1.0, max(0.0, busy - own) / all_) if all_ else 0.0

    @staticmethod
    def _read():
        times = psutil.cpu_times()._asdict()
        times = {k: v for k, v in times.items() if not k.startswith("guest")}  # part of user
        idle = times["idle"] + times.get("iowait", 0.0)
        ours = psutil.Process()
        used = [sum(ours.cpu_times()[:4])]  # the last two are of children that have ended
        for child in ours.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended just now
                used.append(sum(child.cpu_times()[:4]))
        return sum(times.values()), sum(times.values()) - idle, sum(used)
