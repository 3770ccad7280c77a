"""Processes that train one model together, started on this machine and always ended again.

    run("worker.py", workers=2)      # MXNet: a scheduler, a server, and worker.py twice
    torchrun("worker.py", nproc=2)   # PyTorch: worker.py twice, under torchrun

Both hand back what each worker printed. Both raise as soon as one process fails, which MXNet alone
would not tell anybody, and after `timeout` seconds.

Whatever happens, no process is left. They are not ours but children of a keeper: this very file,
run as a program of its own, which hears of our end, however sudden, and then ends all of them.
"""

import ctypes
import importlib.util
import io
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

SERVICE = "import mxnet"  # a scheduler or server: MXNet reads its role and stays in there
# MXNet 1.9.1's server decides by memory that nobody has set whether it keeps float64 weights as
# float32: with memory full of ones it always does, with zeros never. So glibc is asked for zeros.
SERVER = {"GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"}
LAST = 12  # lines of a process's output that an error shows
LOOK = 0.05  # seconds between looks at what processes print
GRACE = 1.0  # seconds between asking processes to end and ending them
KEEPER = "the keeper of the processes"


class Failed(RuntimeError):
    """A process ended as it should not have; the message says which, how, and its last lines."""


def run(script, workers=2, servers=1, **options):
    """Run `python script` as each of the `workers`; returns what each printed, a string each.

    options: as for `Cluster`, and so are the errors.
    """
    with Cluster(script, workers, servers, **options) as cluster:
        return cluster.wait()


def torchrun(script, nproc=2, *, arguments=(), env=None, timeout=120, max_restarts=0, log=print):
    """Run `script` under torchrun as `nproc` workers; returns what each printed, a string each.

    max_restarts: how often torchrun may start all workers anew after one has failed; then a string
    holds what every start printed. The rest as for `Cluster`, and the same errors; RuntimeError
    where PyTorch is missing. torchrun's store and that of worker 0 listen on all addresses of this
    machine; what the workers send one another stays on loopback.
    """
    _whole("torchrun", nproc=(nproc, 1), max_restarts=(max_restarts, 0))
    script = _script("torchrun", script)
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError("torchrun: PyTorch is not installed; `make setup TORCH=1` does it")
    # torchrun chooses a port for worker 0's store, and another program can take it before worker 0.
    for _ in range(2):
        try:
            return _torchrun(script, nproc, arguments, env, timeout, max_restarts, log)
        except Failed as failure:
            if "EADDRINUSE" not in str(failure):
                raise
    return _torchrun(script, nproc, arguments, env, timeout, max_restarts, log)


def _torchrun(script, nproc, arguments, env, timeout, max_restarts, log):
    """`torchrun`, once."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}",
                   "--tee=3", f"--log-dir={logs}", "--monitor-interval=0.1"]
        command = ["-m", "torch.distributed.run", *options, script, *map(str, arguments)]
        # A store that is shared over restarts still has the addresses of those who are gone.
        env = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(env or {})}
        with _Processes({"torchrun": (command, env)}, timeout, log) as processes:
            processes.wait()
        # Not the lines as they came: torchrun puts a worker's name into one that it reads half.
        return ["".join(path.read_text("utf-8", "replace") for path in sorted(
            Path(logs).glob(f"*/*/{i}/stdout.log"), key=os.path.getmtime)) for i in range(nproc)]


class _Processes:
    """Python processes by name, `{name: (arguments, variables)}`, for as long as a block lasts."""

    def __init__(self, commands, timeout, log):
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: the seconds until the deadline, more than 0")
        self._commands, self._timeout, self._log = commands, timeout, log
        self.processes = {}  # name -> process id
        self.printed, self._last = {}, {}  # name -> lines, of standard output and of both
        self._halves = {}  # (kind, worker of torchrun) -> a line that it hasn't ended
        self._failed = None  # a worker of torchrun, and its status
        self._running, self._events = list(commands), deque()

    def __enter__(self):
        from helpers.engine import SETTINGS  # here, since the keeper gets by without the package

        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
        path = [str(Path(__file__).parents[1]), *filter(None, [inherited.get("PYTHONPATH")])]
        base = {**SETTINGS, **inherited, "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.pathsep.join(path)}
        # All write into files that have no name, so that nobody waits for a reader, and nothing is
        # left of them, however we end.
        self._output = {(name, kind): _Lines() for name in (*self._commands, KEEPER)
                        for kind in ("out", "err")}
        files = {key: lines.file.fileno() for key, lines in self._output.items()}
        order = [(name, [sys.executable, *map(os.fspath, arguments)], {**base, **variables},
                  files[name, "out"], files[name, "err"])
                 for name, (arguments, variables) in self._commands.items()]
        self._start = time.monotonic()
        # A session of its own: a Ctrl-C in the terminal is then for us alone.
        self._keeper = subprocess.Popen([sys.executable, "-I", __file__, str(os.getpid())],
                                        stdin=subprocess.PIPE, stdout=files[KEEPER, "out"],
                                        stderr=files[KEEPER, "err"], pass_fds=files.values(),
                                        start_new_session=True)
        try:
            with suppress(BrokenPipeError):  # it has ended, which `wait` says
                self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
                self._keeper.stdin.flush()
            while len(self.processes) < len(order):
                if self._keeper.poll() is not None:
                    self.wait()
                self._look()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self.close()
        for lines in self._output.values():
            lines.file.close()

    def close(self):
        """End all processes that still run, and come back when they are gone."""
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()  # for the keeper this is the sign
        self._keeper.wait()

    def wait(self, until=None):
        """Wait until all have ended well; returns what each worker printed, a string each.

        until: a text; comes back as soon as a process prints a line that holds it.
        Raises Failed or TimeoutError, and has then ended everyone.
        """
        try:
            while self._running:
                line = self._next()
                if until is not None and line is not None and until in line:
                    return None
            self.close()
        except (Failed, TimeoutError):
            self.close()
            self._look()
            while self._events:  # what was said in the meantime
                self._take(*self._events.popleft())
            raise
        if until is not None:
            raise Failed(f"all have ended, and none printed {until!r}")
        workers = [name for name in self._commands if name.startswith("worker")]
        return ["".join(self.printed.get(name, [])) for name in workers]

    def _next(self):
        """Note the next thing that has happened; returns the line where it is one, or raises."""
        while not self._events:
            self._look()
            ended = any(kind == "ended" for kind, *_ in self._events)
            if not ended and time.monotonic() - self._start > self._timeout:
                raise TimeoutError(f"still running after {self._seconds()}, the time allowed: "
                                   f"{', '.join(self._running)}; all were ended."
                                   f"{self._words(*self._last)}")
        kind, name, value = self._events.popleft()
        if kind == "ended" and value != 0:
            raise Failed(self._why(*(self._failed or (name, value))))
        return self._take(kind, name, value)

    def _look(self):
        """Queue what has happened since the last look: a process's last words before its end."""
        time.sleep(LOOK)
        status = self._keeper.poll()
        told = [json.loads(line) for line in self._output[KEEPER, "out"].new(False)]
        self.processes |= {name: number for kind, name, number in told if kind == "started"}
        ended = [event for event in told if event[0] == "ended"]
        names = [name for _, name, _ in ended]
        for (name, kind), lines in self._output.items():
            if (name, kind) != (KEEPER, "out"):
                whole = status is not None or name in names
                for line in lines.new(whole):
                    self._events.extend(self._whose(kind, name, line))
                if whole and name == "torchrun":
                    self._events.extend((*key, text) for key, text in self._halves.items())
                    self._halves.clear()
        self._events.extend(ended)
        if status is not None:
            self._events.append(("ended", KEEPER, status or 1))

    def _whose(self, kind, name, line):
        """Events, each a process's own line, that a line of output has come to.

        torchrun writes a worker's name before each piece that it reads, and the pieces of several
        workers may share a line: those of each are joined until its line ends.
        """
        if name != "torchrun":
            return [(kind, name, line)]
        own, *pieces = re.split(r"\[default(\d+)\]:", line)
        found = [(kind, name, own)] if own else []
        for worker, piece in zip(pieces[::2], pieces[1::2]):
            who = f"worker {worker}"
            text = self._halves.pop((kind, who), "") + piece
            if text.endswith("\n"):
                found.append((kind, who, text))
            else:
                self._halves[kind, who] = text
        return found

    def _take(self, kind, name, value):
        """Note an event; returns the line where it is one."""
        if kind == "ended":
            self._running = [other for other in self._running if other != name]
        else:
            # torchrun ends with 1, whatever has happened; which worker, and how, it only prints.
            failed = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", value)
            if name == "torchrun" and failed:
                self._failed = f"worker {failed[2]}", int(failed[1])
            if kind == "out":
                self.printed.setdefault(name, []).append(value)
            line = f"{name}: {value.rstrip()}"
            self._last.setdefault(name, deque(maxlen=LAST)).append(line)
            if self._log:
                self._log(line)
            return line

    def _why(self, name, status):
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return f"{name} {how} after {self._seconds()}; the rest were ended.{self._words(name)}"

    def _seconds(self):
        return f"{time.monotonic() - self._start:.1f} s"

    def _words(self, *names):
        lines = [line for name in names for line in self._last.get(name, [])]
        return "\n  ".join([" Last lines:", *lines]) if lines else " It printed nothing."


class _Lines:
    """A file without a name that processes write into, and what is new in it."""

    def __init__(self):
        self.file, self._at = tempfile.TemporaryFile(), 0

    def new(self, whole):
        """The lines since the last call; one that isn't finished only if `whole`."""
        file = self.file.fileno()
        text = os.pread(file, os.fstat(file).st_size - self._at, self._at)
        if not whole:
            text = text[: text.rfind(b"\n") + 1]
        self._at += len(text)
        return [line.decode(errors="replace") for line in io.BytesIO(text)]


class Cluster(_Processes):
    """A scheduler, `servers` servers and `workers` workers of MXNet's `dist` KVStores.

        with Cluster("worker.py", workers=2) as cluster:
            cluster.wait(until="step 20")
            os.kill(cluster.processes["worker 1"], signal.SIGKILL)
            cluster.wait()

    script: what each worker runs, with `arguments`; env: more variables for all processes;
    timeout: seconds from the start to the deadline; log: gets each line that any process prints,
    "worker 0: ..." (None: nobody); address: where the scheduler listens, "127.0.0.1:9000" or
    without a port for a free one; the others listen at the same address.

    A worker's number is its `kv.rank`, and the variable COURSE_WORKER has it too.
    `processes` has the process ids by name. Leaving the block ends all that still run.

    Raises ValueError where an argument does not fit, FileNotFoundError without a script, OSError
    where the address is not this machine's or the port is taken. `wait` raises Failed as soon as a
    process ends by a signal or with a status other than 0, TimeoutError at the deadline.
    """

    def __init__(self, script, workers=2, servers=1, *, arguments=(), env=None, timeout=120,
                 log=print, address="127.0.0.1"):
        _whole("Cluster", workers=(workers, 1), servers=(servers, 1))
        script = _script("Cluster", script)
        address, port = _parts(address)
        below = range(15_000, 32_000)  # ports of outgoing connections
        # More than are needed, since some may be taken.
        count = min(len(below), max(200, 2 * (1 + servers + workers)))
        some = random.SystemRandom().sample(below, count)
        (port,) = _free_ports(address, 1, [port] if port else some)
        ports = _free_ports(address, servers + workers, [p for p in some if p != port])
        shared = {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(port),
                  "DMLC_NUM_SERVER": str(servers), "DMLC_NUM_WORKER": str(workers),
                  "DMLC_NODE_HOST": address, **(env or {})}
        service = ["-c", SERVICE]
        commands = {"scheduler": (service, {**shared, "DMLC_ROLE": "scheduler"})}
        for i in range(servers):
            more = {**SERVER, "DMLC_ROLE": "server", "PORT": str(ports[i])}
            commands[f"server {i}"] = (service, {**shared, **more})
        for i in range(workers):
            # Ranks follow the ports: the scheduler sorts those of one host by them.
            more = {"DMLC_ROLE": "worker", "PORT": str(ports[servers + i]), "COURSE_WORKER": str(i)}
            commands[f"worker {i}"] = ([script, *map(str, arguments)], {**shared, **more})
        super().__init__(commands, timeout, log)


def _whole(function, **arguments):
    for name, (value, least) in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{function}({name}={value!r}): {name} must be a whole number, "
                             f"at least {least}")


def _script(function, script):
    path = Path(script).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{function}(script={str(script)!r}): there is no such file; "
                                "pass the path of a Python script")
    return str(path)


def _parts(address):
    """`"127.0.0.1:9000"` as address and port; without a port, that is None."""
    host, colon, port = address.partition(":")
    if not host or colon and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"Cluster(address={address!r}): should be an IPv4 address, with a port "
                         "or without, such as 127.0.0.1:9000")
    return host, int(port) if port else None


def _free_ports(address, count, ports):
    """The first `count` of `ports` at which nobody listens, in rising order, or OSError."""
    found, taken = [], OSError(f"there are no {count} free ports at {address}")
    for port in ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                found.append(port)
            except OSError as error:
                taken = OSError(error.errno, f"cannot listen at {address}:{port}: "
                                f"{error.strerror}; pass an address of this machine, with a port "
                                "that is free or with none")
        if len(found) == count:
            return sorted(found)
    raise taken


def _keep(parent):
    """The keeper: start what the first line of standard input says, and tell on standard output.

    Where the input ends, or the parent has, or on SIGTERM: end every descendant.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: whoever loses its parent becomes our child
    started = []
    try:
        for name, command, env, out, err in json.loads(sys.stdin.readline() or "[]"):
            # PR_SET_PDEATHSIG: killed if the keeper is. A safe place for it: we have one thread.
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=err, start_new_session=True,
                                       preexec_fn=lambda: _prctl(1, 9))
            started.append((name, process))
            _tell("started", name, process.pid)
        for name, process in started:
            threading.Thread(target=_watch, args=(name, process), daemon=True).start()
        while os.getppid() == parent and not select.select([0], [], [], 1.0)[0]:
            pass
    finally:
        _end_descendants()


def _prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(name, process):
    _tell("ended", name, process.wait())


def _tell(*event):
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _end_descendants():
    import psutil  # here: it takes longer than all the rest

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = psutil.Process.terminate
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(left, GRACE)
        end = psutil.Process.kill


if __name__ == "__main__":
    _keep(int(sys.argv[1]))
