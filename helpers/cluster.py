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
import json
import os
import queue
import random
import re
import selectors
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
GRACE = 1.0  # seconds between asking processes to end and ending them


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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}",
                   "--tee=3", f"--log-dir={logs}", "--monitor-interval=0.1"]
        command = ["-m", "torch.distributed.run", *options, script, *map(str, arguments)]
        # A store that is shared over restarts still has the addresses of those who are gone.
        env = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(env or {})}
        with _Processes({"torchrun": (command, env)}, timeout, log) as processes:
            processes.wait()
            return ["".join(processes.printed.get(f"worker {i}", [])) for i in range(nproc)]


class _Processes:
    """Python processes by name, `{name: (arguments, variables)}`, for as long as a block lasts."""

    def __init__(self, commands, timeout, log):
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: the seconds until the deadline, more than 0")
        self._commands, self._timeout, self._log = commands, timeout, log
        self.processes = {}  # name -> process id
        self.printed, self._last = {}, {}  # name -> lines, of standard output and of both
        self._failed = None  # a worker of torchrun, and its status
        self._running, self._events = list(commands), queue.SimpleQueue()

    def __enter__(self):
        from helpers.engine import SETTINGS  # here, since the keeper gets by without the package

        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
        path = [str(Path(__file__).parents[1]), *filter(None, [inherited.get("PYTHONPATH")])]
        base = {**SETTINGS, **inherited, "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.pathsep.join(path)}
        order = [(name, [sys.executable, *map(os.fspath, arguments)], {**base, **variables})
                 for name, (arguments, variables) in self._commands.items()]
        self._start = time.monotonic()
        # A session of its own: a Ctrl-C in the terminal is then for us alone.
        self._keeper = subprocess.Popen([sys.executable, "-I", __file__, str(os.getpid())],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
            self._keeper.stdin.flush()
            while len(self.processes) < len(order):
                self._next()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """End all processes that still run, and come back when they are gone."""
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()  # for the keeper this is the sign
        self._keeper.wait()
        self._reader.join()
        self._keeper.stdout.close()

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
            while not self._events.empty():  # what was said in the meantime
                self._take(*self._events.get())
            raise
        if until is not None:
            raise Failed(f"all have ended, and none printed {until!r}")
        workers = [name for name in self._commands if name.startswith("worker")]
        return ["".join(self.printed.get(name, [])) for name in workers]

    def _next(self):
        left = self._start + self._timeout - time.monotonic()
        try:
            kind, name, value = self._events.get(timeout=max(0, left))
        except queue.Empty:
            raise TimeoutError(self._late()) from None
        if kind == "ended" and value != 0:
            raise Failed(self._why(*(self._failed or (name, value))))
        return self._take(kind, name, value)

    def _take(self, kind, name, value):
        """Note an event; returns the line where it is one."""
        if kind == "started":
            self.processes[name] = value
        elif kind == "ended":
            self._running = [other for other in self._running if other != name]
        else:
            worker = re.match(r"\[default(\d+)\]:", value) if name == "torchrun" else None
            if worker:
                name, value = f"worker {worker[1]}", value[worker.end():]
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
        return f"{name} {how} after {self._seconds()}; the rest were ended.{self._lines([name])}"

    def _late(self):
        return (f"still running after {self._seconds()}, the time allowed: "
                f"{', '.join(self._running)}; all were ended.{self._lines(self._last)}")

    def _seconds(self):
        return f"{time.monotonic() - self._start:.1f} s"

    def _lines(self, names):
        lines = [line for name in names for line in self._last.get(name, [])]
        return "\n  ".join([" Last lines:", *lines]) if lines else " It printed nothing."

    def _read(self):
        for line in self._keeper.stdout:
            self._events.put(json.loads(line))
        self._events.put(["ended", "the keeper of the processes", self._keeper.wait() or 1])


class Cluster(_Processes):
    """A scheduler, `servers` servers and `workers` workers of MXNet's `dist` KVStores.

        with Cluster("worker.py", workers=2) as cluster:
            cluster.wait(until="step 20")
            os.kill(cluster.processes["worker 1"], signal.SIGKILL)
            cluster.wait()

    script: what each worker runs, with `arguments`; env: more variables for all processes;
    timeout: seconds from the start to the deadline; log: gets each line that any process prints,
    "worker 0: ..." (None: nobody); address: where the scheduler listens, "127.0.0.1:9000" or
    without a port for a free one; host: where the others listen, by default at the same address.

    A worker's number is its `kv.rank`, and the variable COURSE_WORKER has it too.
    `processes` has the process ids by name. Leaving the block ends all that still run.

    Raises ValueError where an argument does not fit, FileNotFoundError without a script, OSError
    where the address is not this machine's or the port is taken. `wait` raises Failed as soon as a
    process ends by a signal or with a status other than 0, TimeoutError at the deadline.
    """

    def __init__(self, script, workers=2, servers=1, *, arguments=(), env=None, timeout=120,
                 log=print, address="127.0.0.1", host=None):
        _whole("Cluster", workers=(workers, 1), servers=(servers, 1))
        script = _script("Cluster", script)
        address, port = _parts(address)
        host = host or address
        port = _free_port(address, port) if port else _free_ports(address, 1)[0]
        ports = _free_ports(host, servers + workers, but=port)
        shared = {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(port),
                  "DMLC_NUM_SERVER": str(servers), "DMLC_NUM_WORKER": str(workers),
                  "DMLC_NODE_HOST": host, **(env or {})}
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


def _free_port(address, port):
    """`port` if nobody listens there, or OSError."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {address}:{port}: {error.strerror}; pass "
                          "an address of this machine, with a port that is free or with none"
                          ) from None
        return port


def _free_ports(address, count, but=None):
    """`count` free ports, not `but`, in rising order, below those of outgoing connections."""
    found, last = [], None
    for port in random.SystemRandom().sample(range(15_000, 32_000), 200):
        if port == but:
            continue
        try:
            found.append(_free_port(address, port))
        except OSError as error:
            last = error
        if len(found) == count:
            return sorted(found)
    raise last


def _keep(parent):
    """The keeper: start what the first line of standard input says, report on standard output.

    Where the input ends, or the parent has, or on SIGTERM: end every descendant.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: whoever loses its parent becomes our child
    names, pipes = {}, selectors.DefaultSelector()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)  # a child's end ends the wait below
    try:
        for name, command, env in json.loads(sys.stdin.buffer.readline() or "[]"):
            # PR_SET_PDEATHSIG: killed if the keeper is. A safe place for it: we have one thread.
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       start_new_session=True, preexec_fn=lambda: _prctl(1, 9))
            names[process.pid] = name, process
            for kind, pipe in ("out", process.stdout), ("err", process.stderr):
                os.set_blocking(pipe.fileno(), False)
                pipes.register(pipe, selectors.EVENT_READ, [kind, name, b""])
            _say("started", name, process.pid)
        pipes.register(woken, selectors.EVENT_READ)
        pipes.register(sys.stdin, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in pipes.select(1.0):
                if key.fileobj is sys.stdin:
                    return
                if key.data:
                    _forward(pipes, key)
                else:
                    os.read(woken, 4096)
            for pid, status in _reap():
                if pid in names:
                    _drain(pipes, names[pid][0])
                    _say("ended", names[pid][0], os.waitstatus_to_exitcode(status))
    except BrokenPipeError:
        return
    finally:
        _end_descendants()
        with suppress(BrokenPipeError):
            for name, _ in names.values():
                _drain(pipes, name)
        os._exit(0)  # no flush, no waiting for anything


def _prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(*event):
    data = json.dumps(event).encode() + b"\n"
    while data:
        data = data[os.write(1, data):]


def _forward(pipes, key):
    """Report what has come through a pipe, whole lines only until it is closed."""
    kind, name, rest = key.data
    try:
        new = os.read(key.fd, 2**16)
    except BlockingIOError:
        return False
    *lines, key.data[2] = (rest + new).split(b"\n")
    if not new:  # closed
        pipes.unregister(key.fileobj)
        if rest:
            _say(kind, name, rest.decode(errors="replace"))
        return False
    for line in lines:
        _say(kind, name, line.decode(errors="replace") + "\n")
    return True


def _drain(pipes, name):
    for key in list(pipes.get_map().values()):
        while key.data and key.data[1] == name and _forward(pipes, key):
            pass


def _reap():
    """The ids and statuses of children that have ended, their own orphans among them."""
    with suppress(ChildProcessError):  # there are no more children
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_descendants():
    import psutil  # here: it takes longer than all the rest

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send, ask_until = signal.SIGTERM, time.monotonic() + GRACE
    asked = set()
    while True:
        deque(_reap(), maxlen=0)
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        if time.monotonic() > ask_until:
            send, asked = signal.SIGKILL, set()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if process.pid not in asked:
                    process.send_signal(send)
                    asked.add(process.pid)
        time.sleep(0.02)


if __name__ == "__main__":
    _keep(int(sys.argv[1]))
