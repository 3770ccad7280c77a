"""Clusters hand back what their workers print, and name what fails.

Programs of a few lines stand in MXNet's place: the supervision is the same. With MXNet and PyTorch,
and what happens when processes die, hang or are left: tests/tools/test_cluster_hard.py.
"""

import errno
import os
import socket

import clusters
import pytest
from clusters import SLOW, STAYS, marked, until

from helpers import cluster
from helpers.cluster import Cluster, Failed, run, torchrun

write, stub, nobody_is_left = clusters.write, clusters.stub, clusters.nobody_is_left
pytestmark = pytest.mark.usefixtures("nobody_is_left")


def test_hands_back_what_each_worker_printed(write, stub):
    stub()
    script = write("import os, sys\n"
                   "print('worker', os.environ['COURSE_WORKER'], sys.argv[1:], flush=True)\n"
                   "print('to stderr', file=sys.stderr)\n"
                   "print('no newline', end='')")
    lines = []
    printed = run(script, 3, 2, arguments=["--rate", 0.1], log=lines.append)
    assert printed == [f"worker {i} ['--rate', '0.1']\nno newline" for i in range(3)]
    assert sorted(lines) == sorted(
        line for i in range(3) for line in [f"worker {i}: worker {i} ['--rate', '0.1']",
                                            f"worker {i}: to stderr", f"worker {i}: no newline"])


def test_each_role_has_its_variables(write, monkeypatch):
    show = ("import os; print(*(f'{k}={v}' for k, v in sorted(os.environ.items())"
            " if k.startswith(('DMLC', 'OMP', 'PORT', 'MINE'))), flush=True)")
    monkeypatch.setattr(cluster, "SERVICE", show)
    monkeypatch.setenv("DMLC_ROLE", "server")  # of somebody else's cluster
    monkeypatch.setenv("DMLC_RANK", "7")  # with it, ps-lite would leave a worker without a number
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # Not at random: whoever asks for a free port now is given the same one.
    monkeypatch.setattr(cluster.random.SystemRandom, "sample", lambda _, ports, n: ports[:n])
    lines = []
    run(write(show), 2, 2, env={"MINE": "yes"}, log=lines.append)
    seen = {}
    for line in lines:
        name, _, rest = line.partition(": ")
        seen[name] = dict(pair.split("=") for pair in rest.split())
    assert sorted(seen) == ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    ports = [seen[n].pop("PORT") for n in ("server 0", "server 1", "worker 0", "worker 1")]
    assert sorted(ports) == ports and len(set(ports)) == 4  # ranks follow ports
    root = seen["scheduler"]["DMLC_PS_ROOT_PORT"]
    assert root not in ports, "two that listen at the same port"
    for name, variables in seen.items():
        assert variables == {
            "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_SERVER": "2", "DMLC_NUM_WORKER": "2",
            "DMLC_PS_ROOT_PORT": root, "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_ROLE": name.split()[0], "MINE": "yes", "OMP_NUM_THREADS": "1"}
    assert os.environ["DMLC_ROLE"] == "server" and "PORT" not in os.environ  # ours are untouched


@pytest.mark.parametrize("end, how", [
    ("raise OSError('the disk is full')", "ended with status 1"),
    ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
])
def test_a_failure_names_the_worker_and_ends_the_rest(write, stub, end, how):
    stub(STAYS)
    script = write("import os, sys, time\nprint('I am', os.environ['COURSE_WORKER'])\n"
                   f"if os.environ['COURSE_WORKER'] == '1':\n    {end}\ntime.sleep({STAYS})")
    with pytest.raises(Failed, match=f"^worker 1 {how} after [0-9.]+ s; the rest were ended"
                       ) as info:
        run(script, 2, log=None)
    assert "worker 1: I am 1" in str(info.value) and "I am 0" not in str(info.value)
    assert ("the disk is full" in str(info.value)) == ("disk" in end)
    assert not marked()  # before the exception reached us


def test_the_deadline_holds_and_says_who_still_ran(write, stub):
    stub()
    script = write("import os, signal, time\nprint('here')\n"
                   "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                   f"os.environ['COURSE_WORKER'] == '1' and time.sleep({STAYS})")
    with Cluster(script, 2, timeout=SLOW, log=None) as running:
        running.wait(until="worker 1: here")
        assert until(lambda: len(marked()) == 2)  # the keeper and worker 1
        running._timeout = 0  # it has passed
        with pytest.raises(TimeoutError, match="^still running after [0-9.]+ s, the time allowed: "
                           "worker 1; all were ended") as info:
            running.wait()
    assert "worker 1: here" in str(info.value)
    assert not marked()


@pytest.mark.parametrize("arguments, words", [
    (dict(workers=0), "workers=0.*at least 1"), (dict(servers=1.5), r"servers=1\.5.*whole number"),
    (dict(timeout=float("nan")), "timeout=nan.*more than 0"),
    (dict(address="127.0.0.1:99999"), "address='127.0.0.1:99999'.*127.0.0.1:9000"),
])
def test_arguments_that_do_not_fit_are_named(write, arguments, words):
    with pytest.raises(ValueError, match=words):
        Cluster(write(""), **arguments)


def test_a_script_that_is_not_there_is_named(tmp_path):
    for start in (run, torchrun):
        with pytest.raises(FileNotFoundError, match="nosuch.py.*there is no such file"):
            start(tmp_path / "nosuch.py")


def test_a_port_in_use_and_a_foreign_address_are_named_at_once(write):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen at {where}: .*in use") as info:
            Cluster(write(""), address=where)
    assert info.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.1:.*pass an address"):
        Cluster(write(""), address="192.0.2.1")


def test_torchrun_hands_back_what_each_worker_printed(write):
    pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
    script = write("import os, sys; print(os.environ['RANK'], *sys.argv[1:])")
    lines = []
    assert torchrun(script, 2, arguments=["x"], log=lines.append, timeout=SLOW) == [
        "0 x\n", "1 x\n"]
    assert {"worker 0: 0 x", "worker 1: 1 x"} <= set(lines)


def test_without_pytorch_torchrun_says_how_to_get_it(write, monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="make setup TORCH=1"):
        torchrun(write(""))


def test_each_of_many_processes_has_a_port_of_its_own(monkeypatch):
    made = {}
    monkeypatch.setattr(cluster._Processes, "__init__",
                        lambda self, commands, *_: made.update(commands))
    Cluster(__file__, workers=250, servers=50)
    ports = [variables["PORT"] for _, variables in made.values() if "PORT" in variables]
    assert len(made) == 301 and len(set(ports)) == 300
    with pytest.raises(OSError, match="no 20001 free ports at 127.0.0.1"):
        Cluster(__file__, workers=20_000)


@pytest.mark.parametrize("taken, what", [(2, "returned"), (3, "EADDRINUSE")])
def test_a_port_that_another_took_is_not_the_programs_fault(monkeypatch, taken, what):
    calls = []

    def start(*arguments):
        calls.append(arguments)
        if len(calls) <= taken:
            raise cluster.Failed("worker 0 ended with status 1: EADDRINUSE")
        return ["returned"]

    monkeypatch.setattr(cluster, "_torchrun", start)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: True)
    try:
        found = cluster.torchrun(__file__)[0]
    except cluster.Failed as failure:
        found = str(failure)
    assert what in found and len(calls) == 3
