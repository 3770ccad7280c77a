"""Starts a solution's process with next to nothing in reach, watches it, and ends it.

With bubblewrap (`bwrap`) the process sees the system's and Python's files, all read-only, the few
helpers that a student gets, and an empty folder in memory; no other files, processes or network.
Without bubblewrap only the limits below hold.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

import wire

HERE = Path(__file__).resolve().parent
SECONDS = 20          # of work of one core, for one exercise's solution, all its calls together
PATIENCE = 60         # seconds by the clock: machines are busy, and solutions may sleep
MEMORY = 2 * 2**30    # bytes, all its processes together
SPACE = 8 * 2**30     # bytes of addresses, for one process
PROCESSES = 8         # at one time
OUTPUT = 5 * 10**6    # bytes printed
HELPERS = ["__init__.py", "engine.py", "gpu.py", "device.py"]  # what a student gets
FILE = 64 * 2**20     # bytes of one file, and of each folder that can be written
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
          "/etc/alternatives", "/sys/devices/system/cpu"]  # fmt: skip


@functools.cache
def bubblewrap():
    """The path of a bwrap that works here, or None: it may be absent, or not be permitted."""
    path = shutil.which("bwrap")
    tried = path and subprocess.run([*_walls(path, HERE), "true"], capture_output=True)
    return path if tried and tried.returncode == 0 else None


def _walls(bwrap, stage):
    """The bwrap command up to the program that it starts, in an empty folder."""
    python = {Path(sys.prefix), Path(sys.base_prefix).resolve(),
              Path(sys.executable).resolve().parents[1]}
    command = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
               "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        command += ["--size", str(FILE), "--tmpfs", folder]
    for path in filter(os.path.exists, [*SYSTEM, *map(str, sorted(python))]):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    return [*command, "--ro-bind", str(stage), "/course", "--remount-ro", "/dev",
            "--remount-ro", "/", "--chdir", "/tmp"]


def stage(folder):
    """Copy into `folder` all that a solution's process needs of this repository; returns it."""
    shutil.copytree(HERE.parents[1] / "helpers", folder / "helpers",
                    ignore=lambda _, names: [n for n in names if n not in HELPERS])
    for file in ("solution.py", "wire.py"):
        shutil.copy(HERE / file, folder)
    return folder


class Ended(Exception):
    """The solution's process is gone, and why; what it was asked will not be answered."""


class Solution:
    """One solution in a process of its own, whose functions the judge can call.

    given: sources of the assignment's own cells. answer: the student's. folder: from `stage`.
    Raises RuntimeError where the process can't be started, which is no student's fault.
    """

    def __init__(self, given, answer, folder):
        self.ended, self._clock = None, None
        self._scratch = tempfile.TemporaryDirectory(prefix="solution-")
        to_solution, to_judge = os.pipe(), os.pipe()
        passed = (to_solution[0], to_judge[1])
        bwrap = bubblewrap()
        course = "/course" if bwrap else str(folder)
        self._process = subprocess.Popen(
            [*(_walls(bwrap, folder) if bwrap else []), sys.executable, f"{course}/solution.py",
             *map(str, [*passed, FILE, SPACE])],
            pass_fds=passed, cwd=self._scratch.name, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": "/tmp" if bwrap else
                 self._scratch.name, "PYTHONPATH": course, "COURSE_SIMULATE": "1",
                 "COURSE_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"})
        for end in passed:
            os.close(end)
        self._write, self._read = os.fdopen(to_solution[1], "wb"), os.fdopen(to_judge[0], "rb")
        self._printed, self._tail = 0, b""
        self._done = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True)
                         for work in (self._watch, self._drain)]
        for thread in self._threads:
            thread.start()
        try:
            self._receive()
        except Ended as error:
            self.close()
            raise RuntimeError("a solution's process could not be started: "
                               f"{self._tail.decode(errors='replace')}") from error
        self._clock = time.monotonic()
        with contextlib.suppress(Ended):  # then every call says so
            self._send([given, answer])
            self._receive()

    def call(self, name, args, kwargs):
        """What the solution's function `name` returns. Arguments are changed as it changes them.

        Raises Ended, or what the function raised: a built-in exception where it is one of
        `RAISED`, else Failed.
        """
        known = self._send([name, args, kwargs])
        reply = self._receive(known)
        match reply:
            case {"returned": _, "arguments": [tuple(now), dict(named)]} | {
                    "raised": _, "arguments": [tuple(now), dict(named)]}:
                _follow(args, now)
                _follow(kwargs, named)
        match reply:
            case {"returned": result, "arguments": [tuple(), dict()]}:
                return result
            case {"raised": str(kind), "why": str(why)}:
                raise RAISED.get(kind, Failed)(why if kind in RAISED else f"{kind}: {why}")
        self._kill("what it told the judge is no answer")
        raise Ended(self.ended)

    def close(self):
        """End the process and all that it started. Safe to call twice."""
        self._kill("the judge had heard enough")
        self._done.set()
        for thread in self._threads:
            thread.join(1)
        for stream in (self._write, self._read):
            with contextlib.suppress(OSError):
                stream.close()
        # Without bubblewrap, one that went its own way may live, and still hold this end.
        if not self._threads[-1].is_alive():
            self._process.stdout.close()
        self._scratch.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _send(self, message):
        try:
            return wire.write(self._write, message)
        except OSError:
            raise self._gone() from None

    def _receive(self, known=()):
        try:
            return wire.read(self._read, known)[0]
        except EOFError:
            raise self._gone() from None
        except wire.Unreadable as error:
            self._kill(f"what it told the judge can't be read: {error}")
            raise Ended(self.ended) from error

    def _gone(self):
        code = self._process.wait()
        if self.ended is None:
            self.ended = f"its process ended by itself, with exit status {code}"
        return Ended(self.ended)

    def _kill(self, why):
        if self.ended is None and self._process.poll() is None:
            self.ended = why
        # With bubblewrap the first kill ends the whole process namespace.
        family = _family(self._process.pid)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _watch(self):
        while not self._done.wait(0.1):
            family = _family(self._process.pid)
            used = worked = 0
            for process in family:
                with contextlib.suppress(psutil.Error):
                    used += process.memory_info().rss
                    worked += sum(process.cpu_times()[:2])
            if used > MEMORY:
                self._kill(f"it took more than {MEMORY / 2**30:.0f} GiB of memory")
            elif len(family) > PROCESSES:
                self._kill(f"it started more than {PROCESSES} processes")
            elif self._printed > OUTPUT:
                self._kill(f"it printed more than {OUTPUT // 10**6} MB")
            elif worked > SECONDS:
                self._kill(f"it worked for more than {SECONDS} seconds")
            elif self._clock and time.monotonic() - self._clock > PATIENCE:
                self._kill(f"it was not done after {PATIENCE} seconds")

    def _drain(self):
        while piece := self._process.stdout.read1(2**16):
            self._printed += len(piece)
            self._tail = (self._tail + piece)[-2000:]


class Failed(Exception):
    """The solution raised something that no test waits for."""


RAISED = {kind.__name__: kind for kind in (
    ArithmeticError, IndexError, KeyError, NotImplementedError, TypeError, ValueError,
    ZeroDivisionError)}  # fmt: skip


def _family(pid):
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _follow(before, after):
    """Change lists and dicts in `before`, in place, into what became of them."""
    if isinstance(before, (list, tuple)) and type(before) is type(after):
        for a, b in zip(before, after):
            _follow(a, b)
        if isinstance(before, list):
            before[:] = [a if type(a) is type(b) and isinstance(a, (list, dict)) else b
                         for a, b in zip(before, after)] + after[len(before):]
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            _follow(before[key], after[key])
        kept = {key: before[key] if isinstance(value, (list, dict)) and key in before else value
                for key, value in after.items()}
        before.clear()
        before.update(kept)
