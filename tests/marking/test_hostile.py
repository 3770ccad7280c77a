"""Solutions that attack the marking: none earns a point that it did not compute, none harms others.

Each is judged behind walls as `make grade` does. What it does to its own process is its own
business, so where it computes what was asked it earns it; the rest stays 0.
"""

import os
import re

import book
import pytest
import sandboxed
from marking import process

# (assignment, exercise, what, source, what is said of the first test: a regular expression)
ATTACKS = []


def attack(place, what, source, reason):
    ATTACKS.append((*place.split(), what, source, reason))


EVEN, STEP, GRADIENTS, MEASURE = "ps1 even", "ps3 step", "ps4 gradients", "ps5 measure"

# --- reaching for the caller's variables: the truth is elsewhere -------------------------------
attack(GRADIENTS, "zeroes its caller's weights by frames", """
import sys
def device_gradients(net, x, y, devices):
    frame = sys._getframe(1)
    while frame:
        if "weights" in frame.f_locals:
            for w in frame.f_locals["weights"]:
                w[...] = 0
        frame = frame.f_back
    return [[nd.zeros(p.shape, d, dtype="float64") for d in devices]
            for p in net.collect_params().values()]
""", "has other values")
attack(MEASURE, "overwrites the machine's costs by frames", """
import sys
def measure(push, wait, clock, steps, rounds):
    frame = sys._getframe(1)
    while frame:
        for name in list(frame.f_locals):
            if name in ("costs", "machine", "args"):
                try:
                    frame.f_locals[name][:] = [1.0] * 1000
                except Exception:
                    pass
        frame = frame.f_back
    return 1.0
""", "the arguments did not come back")
attack("ps3 epoch", "overwrites its caller's batches by frames, calls nothing", """
import sys
def train_epoch(images, labels, order, size, step):
    frame = sys._getframe(1)
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, list):
                value.clear()
        frame = frame.f_back
    return 0.0
""", "the arguments did not come back")
attack(EVEN, "looks for expected values in all objects of its process", """
import gc
def split_even(batch, devices):
    for value in gc.get_objects():
        if isinstance(value, list) and len(value) == len(devices) and value and isinstance(
                value[0], mx.nd.NDArray):
            return value
    return [batch] * len(devices)
""", "has shape")
attack(EVEN, "puts an object that equals everything into every list of its process", """
import gc
class Yes:
    def __eq__(self, other): return True
    def __len__(self): return 2
    def __getattr__(self, name): return Yes()
def split_even(batch, devices):
    for value in gc.get_objects():
        if isinstance(value, dict) and "returned" in value:
            value["returned"] = Yes()
    return Yes()
""", "a Yes")
# --- what a call must leave alone ---------------------------------------------------------------
attack("ps3 replicas", "empties the list of devices and returns as many Nones",
       "def make_replicas(params, devices):\n"
       "    k = len(devices)\n    devices.clear()\n    return [None] * k", "is None")
attack(EVEN, "makes all devices the first", """
def split_even(batch, devices):
    devices[:] = [mx.cpu(0)] * len(devices)
    return [batch.copyto(mx.cpu(0)) for d in devices]
""", "has shape")
attack(STEP, "leaves one replica in the list", """
def train_step(xs, ys, replicas, lr):
    del replicas[1:]
    return 0.0
""", "replica 0 has not changed")
attack(STEP, "one list on cpu(0) for all replicas", """
def train_step(xs, ys, replicas, lr):
    x, y = (nd.concat(*[a.copyto(mx.cpu(0)) for a in part], dim=0) for part in (xs, ys))
    p = [a.copyto(mx.cpu(0)) for a in replicas[0]]
    for a in p:
        a.attach_grad()
    with autograd.record():
        mean = loss(x, y, p).mean()
    mean.backward()
    for a in p:
        a -= lr * a.grad
    for i in range(len(replicas)):
        replicas[i] = p
    return mean.asscalar()
""", "another array")
attack("ps5 line", "no number at all", "def fit_line(sizes, seconds):\n"
       "    return float('nan'), float('nan')", "nan")
attack("ps2 ring", "the sum without a message", """
def ring_allreduce(arrays, send):
    total = sum(a.asnumpy() for a in arrays)
    for a in arrays:
        a[:] = mx.nd.array(total, a.context, dtype=a.dtype)
""", "nothing was sent to cpu")
# --- speaking to the judge by itself -------------------------------------------------------------
SOCKETS = """
import os, stat
ends = [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")
        and stat.S_ISSOCK(os.fstat(n).st_mode)]
"""
attack(EVEN, "claims full marks over the channel", SOCKETS + """
import struct
text = b'{"dict": [["marks", {"list": [["even-values", 2, 2, "", "judged"]]}]]}'
for n in ends:
    os.write(n, struct.pack("<QQ", len(text), 0) + text)
""", "no answer|can't be read")
attack(EVEN, "sends a message of 2**62 bytes", SOCKETS + """
import struct
for n in ends:
    os.write(n, struct.pack("<QQ", 2**62, 2**62))
""", "a message of")
attack(EVEN, "sends lists in lists in lists", SOCKETS + """
import struct
text = b"[" * 10**6
for n in ends:
    os.write(n, struct.pack("<QQ", len(text), 0) + text)
""", "can't be read")
attack(EVEN, "sends what would run if it were unpickled", SOCKETS + """
import pickle, struct
class Run:
    def __reduce__(self): return os.system, ("touch /tmp/forged",)
body, text = pickle.dumps(Run()), b'{"array": [0, null, null, null, false]}'
for n in ends:
    os.write(n, struct.pack("<QQ", len(text), len(body)) + text + body)
""", "can't be read")
attack(EVEN, "closes the channel and lives on", SOCKETS + """
import time
for n in ends:
    os.close(n)
time.sleep(1000)
""", "hung up|ended by itself|can't be read")
attack(EVEN, "answers twice", """
import sys
frame = sys._getframe(1)
line = frame.f_locals["line"]
def split_even(batch, devices):
    line.send({"returned": [], "arguments": [], "objects": []})
    return []
""", "no answer|did not come back")
attack(EVEN, "calls a function of the judge's that it was not given", """
import sys
line = sys._getframe(1).f_locals["line"]
def split_even(batch, devices):
    line.send({"call": 1, "arguments": ()})
    return []
""", "no answer")
attack("ps3 epoch", "calls the judge's function after the call it was for", """
import threading, time
def train_epoch(images, labels, order, size, step):
    threading.Thread(target=lambda: (time.sleep(0.3), step(images, labels, 1)), daemon=True).start()
    time.sleep(0.2)
    return 0.0
""", "called for 0 of 3 batches")
attack("ps5 measure", "calls the judge's clock without end",
       "def measure(push, wait, clock, steps, rounds):\n    while True: clock()",
       "worked for more than|called what it was given more than|not done after")
attack("ps3 epoch", "hands the judge's function rubbish", """
def train_epoch(images, labels, order, size, step):
    for args in ((), (None, None, None), (images,), ("x", labels, 3), (images, labels, "n"),
                 (images, labels, float("nan")), (images, labels, 10**400), ([images], [labels], 2),
                 (print, len, int), (images[0], labels[0], -1), (np.ones(3), labels, 1)):
        try:
            step(*args)
        except Exception:
            pass
    return 0.0
""", "missing 3 required")
attack("ps3 epoch", "a keyword of 150,000 characters for the judge's function", """
def train_epoch(images, labels, order, size, step):
    step(images, labels, **{"x" * 150000: 1})
""", "unexpected keyword argument")
attack("ps3 epoch", "asks the judge for more than fits into a message", """
import sys
frame = sys._getframe(1)
line = frame.f_locals["line"]
def train_epoch(images, labels, order, size, step):
    line.send({"call": 1, "arguments": (), "named": {"é" * 10**6: 1, "😀" * 10**5: 2}})
    return 0.0
""", "more than fits into a message")
attack(EVEN, "keys that collide", SOCKETS + """
import struct
text = b'{"dict":[' + b",".join(b"[%d,1]" % (i * (2**61 - 1)) for i in range(1, 100001)) + b']}'
for n in ends:
    os.write(n, struct.pack("<QQ", len(text), 0) + text)
""", "can't be read")
attack(EVEN, "a reason of many megabytes", """
def split_even(batch, devices):
    raise KeyError("😀" + "ab " * 10**7)
""", "KeyError")
attack(EVEN, "three thousand arrays that nobody asked for", """
def split_even(batch, devices):
    return [np.zeros(1) for _ in range(3000)]
""", "3000 entries")
attack("ps6 average", "three thousand arrays where nothing is to be returned, after no work", """
def average(gradients, sizes):
    return [np.zeros(1) for _ in range(3000)]
""", "has other values")
# --- replacing what serves it ------------------------------------------------------------------
attack(EVEN, "replaces modules and what they hold", """
import builtins, sys, numpy.testing, channel, helpers
numpy.testing.assert_array_equal = lambda *a, **k: None
builtins.AssertionError = builtins.ValueError = KeyboardInterrupt
channel.Array = channel.encode = channel.decode = helpers.devices = None
for name in list(sys.modules):
    if name.startswith("numpy"):
        sys.modules[name] = None
def split_even(batch, devices): return [batch] * len(devices)
""", "ended by itself|hung up")
attack(EVEN, "an import hook that hands out its own modules", """
import sys, types
class Hook:
    def find_spec(self, name, *rest):
        import importlib.machinery
        return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec): return types.ModuleType(spec.name)
    def exec_module(self, module): module.__getattr__ = lambda name: (lambda *a, **k: True)
sys.meta_path.insert(0, Hook())
def split_even(batch, devices):
    import judge, marking.judge, tests
    return judge.answer(batch)
""", "is True, not a list")
attack(EVEN, "claims copies that it did not make", """
def split_even(batch, devices):
    import gc
    for one in gc.get_objects():
        if type(one).__name__ == "Marshaller":
            one.pack_array = lambda value: (_ for _ in ()).throw(TypeError("no"))
    return [batch] * len(devices)
""", "ended by itself")
attack(EVEN, "works at exit, in __del__ and in signal handlers", """
import atexit, signal, os, weakref
def claim(*args):
    for n in range(3, 64):
        try: os.write(n, b"x" * 64)
        except OSError: pass
class Late:
    def __del__(self): claim()
kept = Late()
atexit.register(claim)
for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, claim)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
def split_even(batch, devices): return [batch] * len(devices)
""", "can't be read|no answer|ended by itself|hung up|has shape")
attack(EVEN, "a thread that changes arrays between the calls", """
import threading, time
seen = []
def change():
    while True:
        for a in list(seen):
            a[:] = 0
        time.sleep(0.001)
threading.Thread(target=change, daemon=True).start()
def split_even(batch, devices):
    seen.append(batch)
    time.sleep(0.05)
    return [batch[:1].copyto(d) for d in devices]
""", "has shape")
attack(EVEN, "writes into Python's own numbers", """
import ctypes
def split_even(batch, devices):
    ctypes.c_int64.from_address(id(2) + 24).value = 0
    ctypes.c_int64.from_address(id(1) + 24).value = 0
    return []
""", "hung up|ended by itself|can't be read|no answer")
attack(EVEN, "traces every call of its process", """
import sys, threading
def trace(frame, event, arg):
    for name in frame.f_locals:
        if name in ("expected", "due", "returns"):
            raise SystemExit
    return trace
sys.settrace(trace); threading.settrace(trace)
def split_even(batch, devices): return [batch] * len(devices)
""", "has shape")
# --- the system -----------------------------------------------------------------------------------
attack(EVEN, "never ends", "while True: pass", "worked for more than 5 seconds")
attack(EVEN, "sleeps", "import time\ntime.sleep(10**6)", "not done after 20 seconds")
attack(EVEN, "stops its process", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
       "not done after 20 seconds")
attack(EVEN, "leaves", "import os\nos._exit(0)", "ended by itself, with exit status 0")
attack(EVEN, "exits", "import sys\nsys.exit()", "ended by itself|hung up")
attack(EVEN, "crashes", "import ctypes\nctypes.string_at(0)", "ended by itself, with exit status")
attack(EVEN, "takes memory", "kept = []\nwhile True: kept.append(bytearray(b'x') * 10**7)",
       "more than 1 GiB of memory|MemoryError")
attack(EVEN, "prints without end", "while True: print('x' * 10**4)", "printed more than 5 MB")
attack(EVEN, "starts processes without end", """
import os, time
while True:
    if os.fork() == 0:
        time.sleep(1000)
""", "more than 8 processes|BlockingIOError|worked for|GiB of memory")
attack(EVEN, "works in children that it waits for", """
import os
while True:
    if os.fork() == 0:
        for _ in range(10**7): pass
        os._exit(0)
    os.wait()
""", "worked for more than 5 seconds")
attack(EVEN, "starts threads without end", """
import threading, time
threading.stack_size(32768)
while True:
    threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
""", "more than 512 threads|can't start new thread")
attack(EVEN, "works in children that nobody waits for", """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    pid = os.fork()
    if pid == 0:
        for _ in range(5 * 10**6): pass
        os._exit(0)
    try: os.waitpid(pid, 0)
    except ChildProcessError: pass
""", "worked for more than 5 seconds")
attack(EVEN, "leaves a process behind that holds its output", """
import subprocess
subprocess.Popen(["sh", "-c", "setsid sleep 7777 & exit"])
""", "NameError")
attack(EVEN, "nests beyond recursion", "x = " + "(" * 500 + ")" * 500,
       "SyntaxError|Recursion|Memory")
attack(EVEN, "a list in itself", """
def split_even(batch, devices):
    shards = []
    shards.append(shards)
    return shards * len(devices)
""", "is a list, not an mx.nd array")
attack(EVEN, "half of a character", "x = '\\ud800'\n"
       "def split_even(b, d): raise KeyError('\\udc80')", "KeyError")
attack(EVEN, "half of a character in its text", "def split_even(b, d): return '\ud800'", "Unicode")
attack(EVEN, "an error that can't be printed", """
class Silent(Exception):
    def __str__(self): raise RuntimeError
def split_even(batch, devices): raise Silent
""", "Silent")
attack(EVEN, "an error whose class lies", """
class Mine(Exception):
    pass
Mine.__mro__
Mine.__name__ = "ValueError"
Mine.__module__ = "builtins"
def split_even(batch, devices): raise Mine("as if")
""", "ValueError: as if")
WALLED = [   # what only bubblewrap keeps from a solution
    ("reads the tests", "import glob, os\n"
     "seen = [p for p in glob.glob('{repository}/**/*', recursive=True) if '.venv' not in p\n"
     "        and os.path.isfile(p)]\n"
     "raise ValueError(f'sees {{len(seen)}} files')", "sees 0 files"),
    ("uses the network", "import socket\n"
     "try: socket.create_connection(('127.0.0.1', {port}), 3)\n"
     "except OSError: raise ValueError('no way out')\nraise ValueError('connected')", "no way out"),
    ("writes outside", "denied = 0\n"
     "for path in ('{repository}/README.md', '/usr/x', '/course/x', '/x', '/dev/x'):\n"
     "    try: open(path, 'a').write('a solution was here')\n"
     "    except OSError: denied += 'README' not in path   # below its own /tmp it may be there\n"
     "raise ValueError(f'{{denied}} of 4 denied')", "4 of 4 denied"),
    ("sees processes", "import os\n"
     "raise ValueError(f\"{{sum(p.isdigit() for p in os.listdir('/proc'))}} seen\")",
     "(1|2|3|4) seen"),
    ("reads other processes' environment and files", "import os\nfound = []\n"
     "for p in os.listdir('/proc'):\n"
     "    if p.isdigit():\n"
     "        try: found += [1] * (b'mark-my' in open(f'/proc/{{p}}/environ', 'rb').read())\n"
     "        except OSError: pass\n"
     "        try: found.append(open(f'/proc/{{p}}/root{repository}/README.md').read())\n"
     "        except OSError: pass\n"
     "        for end in os.listdir(f'/proc/{{p}}/fd'):\n"
     "            try: found += os.listdir(f'/proc/{{p}}/fd/{{end}}')\n"
     "            except OSError: pass\n"
     "raise ValueError(f'{{len(found)}} found')", "0 found"),
    ("changes the kernel's settings", "import os\nopened = 0\n"
     "for name in ('fs/dir-notify-enable', 'kernel/core_pattern', 'vm/overcommit_memory'):\n"
     "    try: os.close(os.open('/proc/sys/' + name, os.O_WRONLY)); opened += 1\n"
     "    except OSError: pass\n"
     "raise ValueError(f'{{opened}} opened')", "0 opened"),
    ("takes memory that is no process's", "import ctypes, os\ntaken = 0\n"
     "try: os.memfd_create('x'); taken += 1\nexcept OSError: pass\n"
     "taken += ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0\n"
     "raise ValueError(f'{{taken}} taken')", "0 taken"),
    ("makes a user namespace of its own", "import ctypes\n"
     "raise ValueError(ctypes.CDLL(None).unshare(0x10000000))", "-1"),
    ("kills all that it may", "import os, signal\n"
     "for p in os.listdir('/proc'):\n"
     "    if p.isdigit() and int(p) != os.getpid():\n"
     "        try: os.kill(int(p), signal.SIGKILL)\n"
     "        except OSError: pass\n"
     "raise ValueError('and lives')", "and lives|ended by itself|hung up"),
    ("finds secrets in its environment",
     "import os\nraise ValueError('SECRET' in os.environ)", "False"),
]
# --- several processes: each does its work in the constructor of an honest class ----------------
HONEST = """
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        act(dist.get_rank())
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            users = torch.tensor(float(p.grad is not None))
            dist.all_reduce(users)
            if users:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
"""


def attack_ranks(what, body, reason):
    lines = "\n    ".join(body.strip().splitlines())
    attack("ps7 naive", what, f"def act(rank):\n    {lines}\n{HONEST}", reason)


# On a busy machine 20 seconds by the clock pass before a process has had 8 of work.
attack_ranks("rank 1 works without end", "while rank == 1: pass",
             "worked for more than 8 seconds|not done after 20 seconds")
attack_ranks("rank 1 sleeps", "import time\nif rank == 1: time.sleep(1000)",
             "not done after 20 seconds")
attack_ranks("rank 1 ends", "import os\nif rank == 1: os._exit(0)", "rank 1 hung up")
attack_ranks("rank 0 ends", "import os\nif rank == 0: os._exit(7)", "hung up|ended by itself")
attack_ranks("rank 1 stops itself", "import os, signal\nif rank == 1: os.kill(os.getpid(), 19)",
             "not done after 20 seconds")
attack_ranks("rank 1 ends all others", """
import os, signal
for p in os.listdir("/proc") if rank == 1 else ():
    if p.isdigit() and int(p) != os.getpid():
        try: os.kill(int(p), signal.SIGKILL)
        except OSError: pass
""", "hung up|ended by itself")
attack_ranks("rank 1 leaves the group and goes its way",
             "if rank == 1: dist.destroy_process_group(); raise SystemExit",
             "hung up|ended by itself|never comes")
attack_ranks("sends to a rank that isn't there", "dist.broadcast(torch.ones(1), 4)",
             "there are ranks 0 to 1")
attack_ranks("one rank sends what the others don't", "if rank: dist.all_reduce(torch.ones(3))",
             "message 1 is broadcast of .* on rank 0 and all_reduce of")
attack_ranks("messages without end", "while True: dist.barrier()",
             "worked for more than|not done after 20 seconds")
attack_ranks("messages that nobody waits for",
             "while True: dist.all_reduce(torch.ones(2**20), async_op=True)", "nobody waits for")
attack_ranks("a message larger than any", "dist.all_reduce(torch.ones(2**24))",
             "more than fits into a message")
attack_ranks("takes what comes of a message before it is started", """
desk = dist.group.WORLD.start.__closure__[0].cell_contents
desk.ask({"finish": 5})
""", "had not started")
attack_ranks("messages of its own making", """
desk = dist.group.WORLD.start.__closure__[0].cell_contents
from channel import Array
desk.ask({"start": "all_reduce", "arrays": [Array(np.zeros(1))], "detail": "__class__"})
""", "makes no message")
attack_ranks("a kind of message that there isn't", """
desk = dist.group.WORLD.start.__closure__[0].cell_contents
desk.ask({"start": "__init__", "arrays": [], "detail": ""})
""", "no answer")
attack_ranks("speaks for another rank", """
import os, socket
for n in range(3, 64):
    try: s = socket.socket(fileno=os.dup(n))
    except OSError: continue
    raise ValueError(f"{sum(1 for m in range(3, 64) if os.path.exists(f'/proc/self/fd/{m}'))} open")
""", "2 open|3 open")
attack_ranks("the tests' own optimizer and module changed", """
torch.optim.SGD.step = lambda self: None
torch.Tensor.backward = lambda self: None
dist.broadcast = lambda tensor, src: tensor.fill_(1)
""", "is None, not a NumPy array")

attack("ps9 layers", "a backward pass and messages that do nothing", """
torch.Tensor.backward = lambda self: None
dist.all_reduce = lambda tensor: None
class ColumnLinear(nn.Module):
    def __init__(self, linear, gather):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
class RowLinear(ColumnLinear):
    def __init__(self, linear):
        super().__init__(linear, False)
""", "is None, not a NumPy array")
attack("ps9 layers", "computes with the whole weights, shows its parts", """
class ColumnLinear(nn.Module):
    def __init__(self, linear, gather):
        super().__init__()
        self.whole, self.gather = [linear], gather
        self.weight = nn.Parameter(my_part(linear.weight, 0))
        self.bias = nn.Parameter(my_part(linear.bias, 0)) if linear.bias is not None else None
    def forward(self, x):
        y = self.whole[0](x)
        return y if self.gather else y.chunk(dist.get_world_size(), -1)[dist.get_rank()]
class RowLinear(ColumnLinear):
    def __init__(self, linear):
        super().__init__(linear, False)
""", "is None, not a NumPy array")
attack("ps9 schedule", "numbers that equal everything", """
class Any(int):
    def __eq__(self, other): return True
    def __lt__(self, other): return False
    def __hash__(self): return 0
def steps_of(stage, stages, micro_batches, most):
    return [("forward", Any(0)), ("backward", Any(0))] * micro_batches
""", "step 1 has a Any, not the number of a micro-batch")
attack("ps9 schedule", "a list without end", """
def steps_of(stage, stages, micro_batches, most):
    steps = []
    while True:
        steps.append(("forward", 0))
""", "more than 1 GiB of memory|MemoryError|worked for more than 5 seconds")
attack("ps9 mesh", "the caller's function for sums replaced", """
import sys
def synchronize(gradients, kinds, shape):
    frame = sys._getframe(1)
    frame.f_globals["copy"] = lambda tensor: np.zeros(tensor.shape)
    frame.f_globals["sum_over"] = dist.all_gather = lambda *given: given[1]
    return gradients, 0.0
""", "parameter 0 of the list of gradients has other values")

# Smaller limits, so that the tests don't take minutes, and each attack reaches its own first.
QUICK = {"work": 5, "patience": 20, "memory": 2**30}
# One that must use up its work, with little of a busy machine: more of the clock.
PATIENT = {"works in children that nobody waits for": {"patience": 120}}
RANKS = {"work": 8, "memory": 2**31}   # four processes with PyTorch
IN_RANKS = [("ps7", "naive"), ("ps9", "layers"), ("ps9", "mesh")]


@pytest.fixture(scope="session")
def attacked(request):
    """Marks of the attacks that this run asks for, behind walls and without them."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    fill = {"repository": process.REPOSITORY, "port": listener.getsockname()[1]}
    os.environ["SECRET"] = "mark-my-words"
    with listener, sandboxed.start() as pool:
        jobs = {}
        for item in request.session.items:
            if "attacked" in getattr(item, "fixturenames", ()):
                one = item.callspec.params["one"]
                bare = item.callspec.params.get("bare", False)
                source = one[3].format(**fill) if one[2] in {w[0] for w in WALLED} else one[3]
                jobs[one[2], bare] = pool.submit(
                    sandboxed.judge_cell, one[0], one[1], source,
                    QUICK | (RANKS if one[:2] in IN_RANKS else {}) | PATIENT.get(one[2], {}), bare)
        yield jobs
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("one", [pytest.param(a, marks=book.can_run(a[0]),
                                              id="-".join(a[:3])) for a in ATTACKS])
def test_an_attack_earns_nothing(one, attacked):
    marks, left = attacked[one[2], False].result()
    assert all(mark.points == 0 and mark.why for mark in marks), marks
    assert re.search(one[4], marks[0].why), marks
    assert left == 0


@pytest.mark.skipif(not process.find_bubblewrap(),
                    reason="bubblewrap is not here, or not permitted: nothing keeps a solution in")
@pytest.mark.parametrize("one", [("ps1", "even", *w) for w in WALLED], ids=lambda a: a[2])
def test_a_solution_reaches_nothing_but_its_folder(one, attacked):
    marks, left = attacked[one[2], False].result()
    assert all(mark.points == 0 for mark in marks) and left == 0
    assert re.search(one[4], marks[0].why), marks
    assert "a solution was here" not in (process.REPOSITORY / "README.md").read_text()


BARE = [a for a in ATTACKS if a[2] in (
    "leaves a process behind that holds its output", "starts processes without end", "sleeps",
    "works in children that it waits for", "closes the channel and lives on", "exits",
    "rank 1 works without end", "rank 1 ends")]


@pytest.mark.parametrize("one, bare", [
    pytest.param(a, True, marks=book.can_run(a[0]), id=a[2]) for a in BARE])
def test_without_bubblewrap_too_all_processes_are_ended(one, bare, attacked):
    marks, left = attacked[one[2], True].result()
    assert all(mark.points == 0 for mark in marks) and left == 0
    assert re.search(one[4], marks[0].why), marks
