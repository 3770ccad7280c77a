"""Whatever goes wrong in a cluster is told, and leaves no process; MXNet's and PyTorch's clusters.

Where MXNet isn't needed, programs of a few lines stand in its place: the supervision is the same.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import clusters
import psutil
import pytest
from clusters import SLOW, STAYS, environment, marked, until

from helpers.cluster import Cluster, Failed, run, torchrun

write, stub, nobody_is_left = clusters.write, clusters.stub, clusters.nobody_is_left
pytestmark = pytest.mark.usefixtures("nobody_is_left")
needs_torch = pytest.mark.usefixtures("torch_is_there")


@pytest.fixture
def torch_is_there():
    pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")


def test_lines_come_as_they_are_printed(write, stub, tmp_path):
    """The worker prints its second line only after its first one has been logged."""
    stub()
    script = write("import pathlib, sys, time\nprint('one')\n"
                   "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\nprint('two')")
    logged = tmp_path / "logged"
    assert run(script, 1, arguments=[logged], log=lambda line: logged.touch(), timeout=SLOW) == [
        "one\ntwo\n"]


def test_much_output_is_neither_lost_nor_a_reason_to_wait(write, stub, tmp_path):
    stub()
    script = write("import pathlib, sys\nfor i in range(100_000): print(i, 'x' * 50)\n"
                   "pathlib.Path(sys.argv[1]).touch()")
    with Cluster(script, 1, arguments=[tmp_path / "done"], log=None, timeout=SLOW) as running:
        assert until((tmp_path / "done").exists)  # nobody has called wait
        lines = running.wait()[0].splitlines()
    assert len(lines) == 100_000 and lines[-1] == f"99999 {'x' * 50}"


@pytest.mark.parametrize("name", ["scheduler", "server 1"])
def test_whoever_is_killed_is_named(write, stub, name):
    stub(60)
    with Cluster(write("import time; time.sleep(60)"), 1, 2, log=None) as running:
        os.kill(running.processes[name], signal.SIGKILL)
        with pytest.raises(Failed, match=f"^{name} was killed by SIGKILL .* It printed nothing"):
            running.wait()


def test_children_of_workers_end_too(write, stub):
    """Also those that have left their parent's session, or have no parent any more."""
    stub(60)
    script = write("import subprocess, sys, time\n"
                   "nap = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
                   "subprocess.Popen(nap)\n"
                   "subprocess.Popen(nap, start_new_session=True)\n"
                   "fork = 'import subprocess, sys; subprocess.Popen(sys.argv[1:], "
                   "start_new_session=True)'\n"
                   "subprocess.run([sys.executable, '-c', fork, *nap])\n"
                   "print('ready')\ntime.sleep(60)")
    with Cluster(script, 1, log=None) as running:
        running.wait(until="ready")
        assert len(marked()) == 7  # keeper, scheduler, server, worker, and three more
    assert not marked()


def test_a_stopped_worker_ends_too(write, stub):
    stub(60)
    with Cluster(write("import time; time.sleep(60)"), 1, log=None) as running:
        os.kill(running.processes["worker 0"], signal.SIGSTOP)


PARENT = f"""
import sys
import signal
from helpers import cluster
# Whoever started the tests may have these ignored:
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
cluster.SERVICE = "import time; time.sleep({STAYS})"
def log(line):
    print(line, flush=True)
try:
    cluster.run(sys.argv[1], 2, log=log)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
# What a worker does at a signal is seen from outside: a file for each that it got.
SLEEPER = f"""
import os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(__file__).parent
signal.signal(signal.SIGINT, lambda *_: (here / f"interrupt {{os.getpid()}}").touch())
nap = [sys.executable, "-c", "import time; time.sleep({STAYS})"]
subprocess.Popen(nap, start_new_session=True)
print("ready")
time.sleep({STAYS})
"""


@pytest.fixture
def parent(write):
    """Another process with a cluster, whose two workers have a child each; in its own group."""
    script = write(SLEEPER)
    process = subprocess.Popen([sys.executable, write(PARENT, "parent.py"), script],
                               env=environment(), stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        for _ in range(2):
            assert process.stdout.readline().endswith("ready\n")
        # itself, keeper, scheduler, server, 2 workers, 2 children, whose variables can't be read
        # for a moment while they start
        assert until(lambda: len(marked()) == 8), marked()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_all_once_and_is_passed_on(parent, tmp_path):
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal and Jupyter do, to the whole group
    assert parent.communicate(timeout=SLOW)[0] == "interrupted\n"
    assert not marked()
    assert not list(tmp_path.glob("interrupt*")), "the workers got the Ctrl-C as well"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP])
def test_nobody_outlives_the_parent(parent, how):
    os.killpg(parent.pid, how)
    parent.wait(SLOW)
    assert until(lambda: not marked()), marked()


def test_nobody_outlives_a_parent_of_which_a_copy_lives(write):
    """A forked copy holds the pipe to the keeper open; a child of a DataLoader is such a copy."""
    text = PARENT.replace("import sys", "import os, sys, time").replace(
        "    print(line, flush=True)\n", f"    if os.fork() == 0:\n        time.sleep({STAYS})\n"
        "    print(line, flush=True)\n")
    parent = subprocess.Popen([sys.executable, write(text, "parent.py"), write(SLEEPER)],
                              env=environment(), stdout=subprocess.PIPE, text=True)

    def by_role(copy):
        found = []
        for process in marked():
            with suppress(psutil.Error):  # it may end while we ask
                if any("parent.py" in word for word in process.cmdline()) == copy:
                    found.append(process)
        return found

    for _ in range(2):
        parent.stdout.readline()
    # keeper, scheduler, server, 2 workers, 2 children
    assert until(lambda: len(by_role(copy=False)) == 7), by_role(copy=False)
    parent.kill()
    parent.wait()
    assert until(lambda: not by_role(copy=False))
    assert by_role(copy=True), "the copies ended too, so this has shown nothing"
    for copy in by_role(copy=True):
        copy.kill()
    assert until(lambda: not by_role(copy=True))
    parent.stdout.close()


def test_if_the_keeper_is_killed_that_is_said_and_workers_end(write, stub):
    stub(STAYS)
    with Cluster(write(f"import time; time.sleep({STAYS})"), 2, log=None) as running:
        running._keeper.kill()
        with pytest.raises(Failed, match="^the keeper of the processes was killed by SIGKILL"):
            running.wait()
        assert until(lambda: not marked())


def test_why_the_keeper_failed_is_said(write, stub):
    """A variable larger than the system allows: no process can be started with it."""
    stub(60)
    with pytest.raises(Failed, match="(?s)^the keeper of the processes ended with status 1 .*"
                       "Traceback.*Argument list too long"):
        run(write(""), 1, env={"LARGE": "x" * 2**22}, log=None)


# ---- with MXNet ------------------------------------------------------------------------------

SUM = """
from helpers import assert_replicas_equal  # its settings first
import os, mxnet as mx
kv = mx.kv.create("dist_sync")
kv.init("w", mx.nd.zeros(3))
kv.push("w", mx.nd.arange(3) + kv.rank + 1)
out = mx.nd.zeros(3)
kv.pull("w", out=out)
print(kv.rank, kv.num_workers, *out.asnumpy().tolist())
if os.environ.get("STAY"):
    print("ready")
    import time
    time.sleep(100)
"""


def test_the_sum_over_workers_has_its_closed_form_and_sockets_are_on_loopback_only(write):
    with Cluster(write(SUM), 3, 2, env={"STAY": "1"}, log=None, timeout=SLOW) as running:
        for _ in range(3):
            running.wait(until="ready")
        sums = [3 * i + 6.0 for i in range(3)]  # of i + rank + 1 over ranks 0, 1 and 2
        for rank in range(3):
            assert running.printed[f"worker {rank}"][0].split() == [
                str(word) for word in (rank, 3, *sums)]
        for name, pid in running.processes.items():
            sockets = psutil.Process(pid).net_connections("all")
            ends = [a for s in sockets if s.family != socket.AF_UNIX
                    for a in (s.laddr, s.raddr) if a]
            assert {a.ip for a in ends} == {"127.0.0.1"}, (name, ends)
            assert any(s.status == psutil.CONN_LISTEN for s in sockets), name


TRAIN = """
from helpers import load_data
import os, signal, sys
from pathlib import Path
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

here, size, epochs = Path(sys.argv[1]), 16, 3
kv = mx.kv.create("dist_sync")
me, k = kv.rank, kv.num_workers
data = load_data("digits", limit=512)
mx.random.seed(1)
net = nn.Sequential()
net.add(nn.Conv2D(4, 3, strides=3, activation="tanh"), nn.Dense(10))
net.initialize(mx.init.Xavier())
net(mx.nd.zeros((1, 1, 28, 28)))
first = len(list(here.glob("epoch*"))) if me == 0 else 0
agreed = mx.nd.zeros(1)
kv.init(99, mx.nd.zeros(1))
kv.push(99, mx.nd.array([first]))
kv.pull(99, out=agreed)
first = int(agreed.asscalar())
if first:
    net.load_parameters(str(here / f"epoch{first}"))
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
loss = gluon.loss.SoftmaxCrossEntropyLoss()
for epoch in range(first, epochs):
    for step, start in enumerate(range(me * size, 512, k * size)):
        x = mx.nd.array(data.train_images[start : start + size])
        y = mx.nd.array(data.train_labels[start : start + size])
        with autograd.record():
            value = loss(net(x), y)
        value.backward()
        trainer.step(size * k)
        value.wait_to_read()
        if [me, epoch, step] == [1, 1, 5] and os.environ.get("DIE"):
            os.kill(os.getpid(), signal.SIGKILL)
    mx.nd.waitall()
    if me == 0:
        net.save_parameters(str(here / "unfinished"))
        os.replace(here / "unfinished", here / f"epoch{epoch + 1}")
    kv._barrier()
    print("epoch", epoch + 1)
"""


def test_after_a_workers_death_in_mid_epoch_training_resumes_to_the_same_weights(write, tmp_path):
    import mxnet as mx

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    script, options = write(TRAIN), {"log": None, "timeout": SLOW}
    lines = ["epoch 1\n", "epoch 2\n", "epoch 3\n"]
    assert run(script, 2, arguments=[whole], **options) == ["".join(lines)] * 2
    with pytest.raises(Failed, match="^worker 1 was killed by SIGKILL") as info:
        run(script, 2, arguments=[broken], env={"DIE": "1"}, **options)
    assert "worker 1: epoch 1" in str(info.value)
    assert not marked()
    assert [p.name for p in broken.glob("*")] == ["epoch1"]  # the death was in mid-epoch
    assert run(script, 2, arguments=[broken], **options) == ["".join(lines[1:])] * 2
    start, expected, resumed = (mx.nd.load(str(path)) for path in (
        whole / "epoch1", whole / "epoch3", broken / "epoch3"))
    assert len(expected) == 4 and set(expected) == set(resumed)
    for name, weights in expected.items():
        assert (weights != start[name]).sum() > 0, "it learnt nothing, so any weights would do"
        assert (weights == resumed[name]).asnumpy().all(), name


# ---- several hosts ---------------------------------------------------------------------------

# A namespace a host, each with an address of its own, all on one bridge. The outer shell is a
# host as well, the scheduler's; PIDs of the inner ones keep their namespaces open.
HOSTS = """
set -e
ip link set lo up
ip link add name bridge type bridge
ip addr add 10.77.0.1/24 dev bridge
ip link set bridge up
for i in 2 3 4; do
    unshare -n sleep 100 &
    pid=$!
    here=$(readlink /proc/self/ns/net)
    while [ "$(readlink /proc/$pid/ns/net)" = "$here" ]; do sleep 0.05; done
    ip link add out$i type veth peer name in$i netns $pid
    ip link set out$i master bridge up
    nsenter -t $pid -n ip link set lo up
    nsenter -t $pid -n ip addr add 10.77.0.$i/24 dev in$i
    nsenter -t $pid -n ip link set in$i up
    eval host$i=$pid
done
export DMLC_PS_ROOT_URI=10.77.0.1 DMLC_PS_ROOT_PORT=9000 DMLC_NUM_SERVER=1 DMLC_NUM_WORKER=2
export OMP_NUM_THREADS=1
DMLC_ROLE=scheduler "$PYTHON" -c "import mxnet" &
s=$!
DMLC_ROLE=server DMLC_NODE_HOST=10.77.0.2 nsenter -t $host2 -n "$PYTHON" -c "import mxnet" &
v=$!
DMLC_ROLE=worker DMLC_NODE_HOST=10.77.0.3 nsenter -t $host3 -n "$PYTHON" "$1" > "$1.3" &
w=$!
DMLC_ROLE=worker DMLC_NODE_HOST=10.77.0.4 nsenter -t $host4 -n "$PYTHON" "$1" > "$1.4"
wait $w
wait $v
wait $s
kill $host2 $host3 $host4
"""


def namespaces():
    """How to get network namespaces here, or a skip that says why there are none."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces are Linux's")
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        with suppress(FileNotFoundError):
            tried = subprocess.run(
                [*command, "sh", "-c", "ip link add name veth1 type veth peer name veth2 &&"
                 " ip link add name bridge1 type bridge && nsenter --version"],
                capture_output=True, text=True)
            if tried.returncode == 0:
                return [*command, "--kill-child", "--fork", "--pid", "--mount-proc"]
            why = tried.stderr.strip()
            continue
        why = "no unshare"
    pytest.skip(f"network namespaces are not to be had: {why}")


def test_hosts_with_addresses_of_their_own(write):
    command = namespaces()
    script = write(SUM)
    done = subprocess.run([*command, "sh", write(HOSTS, "hosts.sh"), script], timeout=SLOW,
                          env={**environment(), "PYTHON": sys.executable},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = {Path(f"{script}.{i}").read_text() for i in (3, 4)}
    assert printed == {f"{rank} 2 3.0 5.0 7.0\n" for rank in (0, 1)}


# ---- with PyTorch ----------------------------------------------------------------------------

TORCH = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print(dist.get_rank(), value.item(), *sys.argv[1:])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and os.environ.get("DIE") == str(dist.get_rank()):
    os.kill(os.getpid(), 9)
if first:
    time.sleep(60)
dist.destroy_process_group()  # or its threads may abort the process as it ends
"""


@needs_torch
def test_torchrun_starts_all_anew_and_hands_back_what_they_printed(write):
    lines = []
    printed = torchrun(write(TORCH), 2, arguments=["x"], env={"DIE": "1"}, log=lines.append,
                       timeout=SLOW, max_restarts=1)
    assert printed == ["0 3.0 x\n" * 2, "1 3.0 x\n" * 2]
    assert {"worker 0: 0 3.0 x", "worker 1: 1 3.0 x"} <= set(lines)
    assert not marked()


@needs_torch
def test_torchrun_hands_back_a_line_that_it_saw_half_written(write):
    script = write("import time; print('half', end=''); time.sleep(1); print(' a line')")
    lines = []
    assert torchrun(script, 2, log=lines.append, timeout=SLOW) == ["half a line\n"] * 2
    assert sorted(lines) == ["worker 0: half a line", "worker 1: half a line"]


@needs_torch
def test_torchruns_dead_worker_is_named(write):
    with pytest.raises(Failed, match="^worker 1 was killed by SIGKILL after") as info:
        torchrun(write(TORCH), 2, env={"DIE": "1"}, log=None, timeout=SLOW)
    assert "worker 1: 1 3.0" in str(info.value)
    assert not marked()


@needs_torch
def test_torchruns_workers_end_at_the_deadline(write):
    with pytest.raises(TimeoutError, match="the time allowed: torchrun; all were ended"):
        torchrun(write("import time; time.sleep(60)"), 2, log=None, timeout=6)
    assert not marked()


# Run in a network namespace, where the store's port is open to nobody else.
LISTENERS = """
import json, os, socket, subprocess, sys, threading
for command in ("link set lo up", "link add name other type veth peer name end",
                "addr add 10.77.0.1/24 dev other", "link set other up", "link set end up"):
    subprocess.run(["ip", *command.split()], check=True)
import psutil
from helpers.cluster import torchrun

def listening(process):
    return [list(c.laddr) for c in process.net_connections("tcp") if c.status == "LISTEN"]

def look(line):
    if "ready" not in line or found:
        return
    (keeper,) = psutil.Process().children()
    for process in keeper.children(recursive=True):
        role = "worker" if "RANK" in process.environ() else "torchrun"
        found.setdefault(role, []).extend(listening(process))
    for ip, port in found["torchrun"] + found["worker"]:
        if ip != "127.0.0.1":
            socket.create_connection(("10.77.0.1", port), 5).close()
    print(json.dumps(found))

found = {}
torchrun(sys.argv[1], 2, timeout=90, log=look)
"""


@needs_torch
def test_two_stores_of_torchrun_listen_everywhere_and_the_workers_on_loopback(write):
    command = namespaces()
    workers = write("import time, torch.distributed as dist\ndist.init_process_group('gloo')\n"
                    "dist.barrier(); print('ready', flush=True); time.sleep(3)\n"
                    "dist.destroy_process_group()\n")
    done = subprocess.run([*command, sys.executable, write(LISTENERS, "look.py"), workers],
                          env=environment(), timeout=SLOW, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    everywhere = {role: sum(ip in ("::", "0.0.0.0") for ip, _ in found[role]) for role in found}
    assert everywhere == {"torchrun": 1, "worker": 1}, "torchrun's docstring says which"
    assert len(found["torchrun"]) == 1 and len(found["worker"]) > 1
    assert {ip for ip, _ in found["worker"]} <= {"::", "0.0.0.0", "127.0.0.1"}, found
