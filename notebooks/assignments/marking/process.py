"""Starts a solution's process behind walls, limits it, and ends it with all that it started.

With bubblewrap (`bwrap`) the process sees the system's and Python's files, all read-only, the few
helpers that a student gets, and an empty folder in memory; no other files, processes or network.
Without bubblewrap only the limits below hold.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from marking.channel import Channel, Late, Unreadable

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
          "/etc/alternatives", "/sys/devices/system/cpu"]  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36   # linux/prctl.h
PR_SET_PDEATHSIG = 1
START = 120                   # seconds for a process to get ready, on a machine that is busy


class Limits(NamedTuple):
    """What one exercise's solution may use, in all its calls and processes together. A cell of an
    earlier exercise that is read before it has the same for itself."""

    work: float = 20            # seconds of one core
    patience: float = 60        # seconds by the clock, while it is its turn
    memory: int = 2 * 2**30     # bytes
    space: int = 8 * 2**30      # bytes of addresses, for one process
    processes: int = 8          # at one time
    threads: int = 512          # at one time; MXNet has some for each device
    output: int = 5 * 10**6     # bytes printed
    file: int = 64 * 2**20      # bytes of one file, and of each folder that can be written


LIMITS = Limits()


class Used(NamedTuple):
    """What a process and all that came of it have in use, or have used so far."""

    processes: int = 0
    threads: int = 0
    work: float = 0       # seconds of one core
    memory: int = 0       # bytes
    printed: int = 0      # bytes


class Ended(Exception):
    """The solution's process is gone, and why; what it was asked will not be answered."""


@functools.cache
def find_bubblewrap():
    """The bwrap command with the options that work here, or None: it may not be permitted."""
    path = shutil.which("bwrap")
    for options in (["--unshare-user", "--disable-userns"], []) if path else ():
        command = [path, "--unshare-all", *options]
        tried = subprocess.run([*command, "--ro-bind", "/", "/", "--proc", "/proc", "true"],
                               stdin=subprocess.DEVNULL, capture_output=True)
        if tried.returncode == 0:
            return command
    return None


def build_walls(work_folder, hidden, limits):
    """The bwrap command up to the program that it starts, in an empty folder.

    work_folder: what the process gets as /course. hidden: folders that stay empty, wherever they
    lie.
    """
    python = {Path(sys.prefix), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(),
              Path(sys.executable).resolve().parents[1]}
    command = [*find_bubblewrap(), "--die-with-parent", "--new-session", "--cap-drop", "ALL",
               "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        command += ["--size", str(limits.file), "--tmpfs", folder]
    shown = {Path(path) for path in SYSTEM} | python
    hidden = {Path(path).resolve() for path in hidden if Path(path).exists()} - shown
    hidden = {path for path in hidden
              if any(path.is_relative_to(other.resolve()) for other in shown)}
    # From the outside in: what lies in a hidden folder can be shown again, as .venv is, and what
    # lies in a shown one hidden again.
    for path in sorted({*shown, *hidden}, key=lambda path: len(path.parts)):
        if path in hidden:
            command += ["--tmpfs", str(path)]
        elif path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--ro-bind", str(work_folder), "/course", "--chdir", "/tmp"]
    for path in (*hidden, "/proc", "/dev", "/"):  # /proc/sys is the kernel's, and root may write
        command += ["--remount-ro", str(path)]
    return command


def make_work_folder(folder, helpers):
    """Copy into `folder` all that a solution's process needs of this repository; returns it.

    helpers: names of files in helpers/.
    """
    (folder / "helpers").mkdir()
    for name in helpers:
        shutil.copy(REPOSITORY / "helpers" / name, folder / "helpers")
    for name in ("solution.py", "channel.py", "backend.py"):
        shutil.copy(HERE / name, folder)
    return folder


def forbid_memory():
    """A file with a seccomp filter against memory that belongs to no process: memfd, System V.

    A program in the kernel's language for packets (linux/filter.h): load the architecture and the
    number of the system call, compare, allow or answer EPERM. None on another machine.
    """
    if platform.machine() != "x86_64":
        return None
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000
    calls = [319, 447, 29]   # memfd_create, memfd_secret, shmget
    step = struct.Struct("<HBBI").pack
    program = [step(0x20, 0, 0, 4), step(0x15, 1, 0, 0xC000003E), step(0x06, 0, 0, kill),
               step(0x20, 0, 0, 0), step(0x35, len(calls) + 1, 0, 0x40000000)]  # another ABI
    program += [step(0x15, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    program += [step(0x06, 0, 0, allow), step(0x06, 0, 0, deny)]
    file = tempfile.TemporaryFile()
    file.write(b"".join(program))
    file.seek(0)
    return file


class Connection:
    """What one rank of a `Process` and the judge say to each other."""

    def __init__(self, process, channel, who):
        self.process, self.channel, self.who = process, channel, who

    def send(self, tree):
        """Raises Ended."""
        with self.process.told(self.who):
            self.channel.send(tree)

    def receive(self):
        """Raises Ended."""
        with self.process.told(self.who):
            return self.channel.receive()

    def end(self, why):
        """End the process for the reason `why`. Raises Ended."""
        self.process.end(why)


class Process:
    """One solution's process. What goes wrong with it is told once, and the same ever after.

    work_folder: from `make_work_folder`. hidden: folders to keep from it. ranks: it forks
    that often, less one; each fork has a connection of its own, `lines[rank]`. Leaving the `with`
    block ends it and every process that came of it.
    """

    def __init__(self, work_folder, hidden=(), limits=LIMITS, ranks=1):
        self.limits, self.why, self._printed, self._tail = limits, None, 0, b""
        self._begin = None                         # what was used when the clock was started
        self._account = threading.Lock()           # nothing is set against an older start
        self._scratch = tempfile.mkdtemp(prefix="solution-")
        pairs = [socket.socketpair() for _ in range(ranks)]
        walls = build_walls(work_folder, hidden, limits) if find_bubblewrap() else []
        self._own = 2 if walls else 0    # processes of bubblewrap's
        self._seen = {}                  # seconds of work of every process there ever was
        passed, forbidden = [its for _, its in pairs], forbid_memory() if walls else None
        numbers = ",".join(str(its.fileno()) for its in passed)
        if forbidden:
            passed.append(forbidden)
            walls += ["--seccomp", str(forbidden.fileno())]
        course, home = ("/course", "/tmp") if walls else (str(work_folder), self._scratch)
        with contextlib.ExitStack() as opened:
            for file in passed:
                opened.enter_context(file)
            self._process = subprocess.Popen(
                [*walls, sys.executable, f"{course}/solution.py",
                 numbers, str(limits.file), str(limits.space)],
                pass_fds=[file.fileno() for file in passed], cwd=self._scratch,
                start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8",
                     "PYTHONPATH": course, "COURSE_SIMULATE": "1", "COURSE_OFFLINE": "1",
                     "PYTHONDONTWRITEBYTECODE": "1"})
        self.lines = [Connection(self, Channel(mine, START), f"rank {rank}" if ranks > 1 else "it")
                      for rank, (mine, _) in enumerate(pairs)]
        self._done = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True)
                         for work in (self._watch, self._drain)]
        for thread in self._threads:
            thread.start()

    def start_clock(self):
        """From now on it is the solution that works: what was used before doesn't count.

        Started again for each cell. Raises Ended where what ran before has used too much.
        """
        with self._account:
            if self.why:
                raise Ended(self.why)
            for line in self.lines:
                line.channel.left = self.limits.patience
            self._begin = self._measure()

    def end(self, why):
        """End it for the reason `why`, which `Ended` then has; raises that."""
        self._kill(why)
        raise Ended(self.why)

    def describe_output(self):
        """The end of what it printed."""
        return self._tail.decode(errors="replace").strip()

    def close(self):
        self._kill("the judge had heard enough")
        self._done.set()
        for thread in self._threads:
            thread.join(1)
        for line in self.lines:
            line.channel.close()
        if not self._threads[-1].is_alive():
            self._process.stdout.close()
        remove_folder(self._scratch)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @contextlib.contextmanager
    def told(self, who):
        """A block that talks to it, or to the rank `who`: raises Ended."""
        try:
            yield
        except Late:
            self.end(f"it was not done after {self.limits.patience:g} seconds")
        except Unreadable as error:
            self.end(f"what it told the judge can't be read: {error}")
        except (EOFError, OSError):
            # It may have closed the socket and live on.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)   # a busy machine takes its time
            code = self._process.poll()
            self.end(f"{who} hung up" if code is None else
                     f"its process ended by itself, with exit status {code}")

    def _kill(self, why):
        self.why = self.why or why
        # With bubblewrap, the end of its first process is the end of all of them.
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        # Without, some may have gone their own way: they have become children of the judge.
        end_children()

    def _watch(self):
        while not self._done.wait(0.05):
            with self._account:
                if why := self._find_excess():
                    self.why = self.why or f"it {why}"
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                    for one in find_children():
                        with contextlib.suppress(psutil.Error):
                            one.kill()

    def _find_excess(self):
        """Of what it has used more than it may, or None."""
        limits, now = self.limits, self._measure()
        used = Used(*(one - before for one, before in zip(now, self._begin or Used())))
        if used.memory > limits.memory:
            return f"took more than {limits.memory / 2**30:g} GiB of memory"
        if used.processes > limits.processes:
            return f"started more than {limits.processes} processes"
        if used.threads > limits.threads:
            return f"started more than {limits.threads} threads"
        if used.printed > limits.output:
            return f"printed more than {limits.output // 10**6} MB"
        if self._begin and used.work > limits.work:   # getting ready may take its time
            return f"worked for more than {limits.work:g} seconds"
        return None

    def _measure(self):
        """What it has used: `Used`, with the work of processes that have ended."""
        count, threads, worked, used = -self._own, 0, 0, 0
        for process in find_children():
            with contextlib.suppress(psutil.Error):
                with process.oneshot():
                    times = process.cpu_times()
                    worked += sum(times[:4])    # its own, and that of children it waited for
                    self._seen[process.pid] = sum(times[:2])
                    used += process.memory_info().rss
                    threads += process.num_threads()
                count += 1
        worked = max(worked, sum(list(self._seen.values())))   # a copy: two threads measure
        return Used(count, threads, worked, used, self._printed)

    def _drain(self):
        with contextlib.suppress(ValueError, OSError):
            while piece := self._process.stdout.read1(2**16):
                self._printed += len(piece)
                self._tail = (self._tail + piece)[-2000:]


def remove_folder(path):
    """Remove a folder, however deep a solution has made it: Python's own way is recursive."""
    subprocess.run(["rm", "-rf", path], stderr=subprocess.DEVNULL)


def adopt_orphans():
    """From now on a process whose parent ends becomes this one's child, and can be found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent():
    """From now on this process is ended when the one that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def find_children():
    """All processes that came of this one."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def end_children(seconds=10):
    """End every process that came of this one; whoever is started meanwhile too."""
    deadline = time.monotonic() + seconds
    while children := find_children():
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, 0.2)
        for child in children:  # orphans that were adopted: nobody else waits for them
            with contextlib.suppress(OSError):
                os.waitpid(child.pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes that can't be ended: {[c.pid for c in children]}")
