"""Knowing whether a measurement had the machine to itself."""

from contextlib import suppress

import psutil


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
