"""`Others` sees other programs' work, and not our own; what `in_turns` runs, keeps and prints."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from helpers import timing
from helpers.timing import Others, Spread, Team, in_turns, print_times, spread


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_neighbour_is_seen():
    # A shell starts it and ends, so that it is nobody's child.
    start = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    neighbour = int(subprocess.check_output(["sh", "-c", start]))
    try:
        time.sleep(0.3)
        with Others() as others:
            time.sleep(1)
    finally:
        os.kill(neighbour, signal.SIGKILL)
    assert 0.5 / psutil.cpu_count() < others.share <= 1


def test_our_own_work_is_not_counted():
    before = psutil.cpu_times()
    with Others() as others:
        spin(1)
    after = psutil.cpu_times()
    busy = sum(after) - sum(before) - (after.idle - before.idle)
    assert others.share < (busy - 0.5) / (sum(after) - sum(before))


def test_a_process_that_we_started_is_ours_while_it_runs_and_after():
    work = "import time\nwhile time.process_time() < {}: pass"
    before = psutil.cpu_times()
    with Others() as others:
        child = subprocess.Popen([sys.executable, "-c", work.format(10)])
        subprocess.run([sys.executable, "-c", work.format(0.7)], check=True)
    child.kill()
    child.wait()
    after = psutil.cpu_times()
    busy = sum(after) - sum(before) - (after.idle - before.idle)
    assert others.share < (busy - 1.0) / (sum(after) - sum(before))


# ---- in turns ----


def noting(log, *names):
    """Contestants that note when they run, and a wait that notes itself."""
    def contestant(name):
        return lambda: log.append(name)
    return {name: contestant(name) for name in names}, lambda: log.append("wait")


def test_each_round_runs_every_contestant_once_between_two_waits():
    log = []
    contestants, wait = noting(log, "a", "b", "c")
    times = in_turns(contestants, rounds=5, warm_up=2, wait=wait)
    assert list(times) == ["a", "b", "c"]
    assert all(len(seconds) == 5 for seconds in times.values())
    assert len(log) == 7 * 3 * 3
    orders = set()
    for begin in range(0, len(log), 9):
        part = log[begin:begin + 9]
        assert part[0::3] == part[2::3] == ["wait"] * 3
        assert sorted(part[1::3]) == ["a", "b", "c"]
        orders.add(tuple(part[1::3]))
    assert len(orders) > 1, "the order must change"


def test_the_seed_decides_the_order():
    logs = []
    for options in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {}, {}):
        log = []
        contestants, wait = noting(log, "a", "b", "c")
        in_turns(contestants, rounds=8, wait=wait, **options)
        logs.append(log)
    assert logs[0] == logs[1] != logs[2]
    assert logs[3] == logs[4], "the same order by default, too"


def test_the_time_is_that_of_the_contestant_and_of_the_wait_after_it(monkeypatch):
    now = 0

    def let_pass(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    waits = iter([10, 2] * 9)  # before, after
    times = in_turns({"a": lambda: let_pass(3)}, rounds=9, warm_up=0,
                     wait=lambda: let_pass(next(waits)))
    assert times["a"].tolist() == [5] * 9


def test_by_default_it_waits_for_mxnet(monkeypatch):
    import mxnet as mx

    log = []
    monkeypatch.setattr(mx.nd, "waitall", lambda: log.append("waits"))
    in_turns({"work": lambda: log.append("work")}, rounds=2, warm_up=0)
    assert log == ["waits", "work", "waits"] * 2


class Disturbed:
    """In the place of Others: says how much others used, one number a round."""

    shares = iter(())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.share = next(Disturbed.shares)


@pytest.mark.parametrize(("shares", "kept", "said"), [
    ([0, 0, 0], [0, 1, 2], ""),
    ([0, 0.5, 0, 0], [0, 2, 3], "1 of 4 rounds left out: others used more than 2% of the machine"),
    ([0, 0.5, 0.5, 0, 0.5, 0.5], None, "only 2 of 6 rounds were quiet, so all are used"),
    ([0.5] * 6, None, "only 0 of 6 rounds were quiet, so all are used"),
])
def test_a_disturbed_round_is_taken_again(monkeypatch, capsys, shares, kept, said):
    Disturbed.shares = iter(shares)
    monkeypatch.setattr(timing, "Others", Disturbed)
    rounds = []
    found = in_turns({"a": lambda: rounds.append(1)}, rounds=3, warm_up=0, quiet=0.02,
                     wait=lambda: None)["a"]
    assert len(rounds) == len(shares) and len(found) == len(kept or shares)
    printed = capsys.readouterr().out
    assert said in printed and bool(said) == bool(printed)


def test_of_two_rounds_two_quiet_ones_are_enough(monkeypatch, capsys):
    Disturbed.shares = iter([0, 0.5, 0])
    monkeypatch.setattr(timing, "Others", Disturbed)
    found = in_turns({"a": lambda: None}, rounds=2, warm_up=0, quiet=0.02, wait=lambda: None)
    assert len(found["a"]) == 2
    assert "1 of 3 rounds left out" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ({"contestants": {}, "rounds": 3}, "contestants={}"),
    ({"contestants": {"a": print}, "rounds": 0}, "rounds=0"),
    ({"contestants": {"a": print}, "rounds": 3, "warm_up": -1}, "warm_up=-1"),
])
def test_nothing_to_measure_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        in_turns(**arguments)


def test_spread_is_numpys_quartiles():
    seconds = [5, 1, 4, 2, 3]
    assert spread(seconds) == Spread(*np.percentile(seconds, [25, 50, 75])) == (2, 3, 4)
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_one_row_a_name(capsys):
    print_times({"a": np.array([1e-3, 2e-3, 3e-3]), "longer": np.array([0.5] * 3)})
    assert capsys.readouterr().out.splitlines() == [
        "a             2 ms  (1.5 to 2.5)", "longer      500 ms  (500 to 500)"]
    print_times({"a": np.array([4e-6] * 3)}, unit="µs")
    assert capsys.readouterr().out == "a        4 µs  (4 to 4)\n"
    with pytest.raises(ValueError, match="unit='min'"):
        print_times({}, unit="min")


# ---- in new processes ----

PROGRAM = """
import os
import helpers
from helpers.timing import in_new_processes
from mxnet import nd

FACTOR = 3

def doubled(x):
    return 2 * x

def work(x):
    print("not to be seen")
    os.environ["LEFT"] = os.environ.get("LEFT", "") + "x"
    return (os.getpid(), doubled(x) * FACTOR, nd.ones(3).sum().asscalar(),
            os.environ["OMP_NUM_THREADS"], os.environ["LEFT"])

def fails(x):
    raise KeyError("planted")

if __name__ == "__main__":
    found = in_new_processes(work, range(2))
    assert len({pid for pid, *_ in found} | {os.getpid()}) == 3, "processes of their own"
    assert [rest for _, *rest in found] == [[0, 3, "1", "x"], [6, 3, "1", "x"]], found
    for pid, *_ in found:
        assert not os.path.exists(f"/proc/{pid}"), "it must have ended"
    try:
        in_new_processes(fails, [1])
    except KeyError as error:
        print("raised here:", error)
"""


def test_each_call_has_a_process_of_its_own(tmp_path):
    """As from a notebook: the functions are those of `__main__`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(root)})
    assert (done.returncode, done.stdout) == (0, "raised here: 'planted'\n"), done.stderr


# ---- programs that work when they are told to ----

ECHO = """
import os, sys
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "fail":
        sys.exit("on purpose")
    print(os.environ.get("WHO", "nobody"), line.strip(), flush=True)
"""


def test_a_team_gets_its_order_and_its_environment_each_time():
    command = [sys.executable, "-c", ECHO]
    with Team([command, command], "6", os.environ | {"WHO": "me"}) as team:
        assert team() == ["me 6", "me 6"]
        assert team() == ["me 6", "me 6"]
        programs = team._programs
    assert all(program.poll() is not None for program, _ in programs), "ended"
    with Team([command], "6", {"PATH": os.environ["PATH"]}) as team:
        assert team() == ["nobody 6"]


MEET = """
import sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
input()
(folder / name).touch()
deadline = time.monotonic() + 30
while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
print(len(list(folder.iterdir())), flush=True)
"""


def test_a_teams_programs_work_at_the_same_time(tmp_path):
    """Each waits until all have begun; one after the other, the first would wait in vain."""
    with Team([[sys.executable, "-c", MEET, tmp_path, name] for name in "abc"]) as team:
        assert team() == ["3", "3", "3"]


@pytest.mark.parametrize("code", [ECHO, "raise SystemExit('on purpose')"])
def test_a_program_that_ends_is_reported_with_its_words(code):
    with pytest.raises(RuntimeError, match="on purpose"):
        with Team([[sys.executable, "-c", code]], "fail") as team:
            team()


# More than a pipe holds. Where nobody reads it, it would wait for ever: then it ends itself.
TALKS = """
import os, sys, threading
timer = threading.Timer(30, os._exit, [1])
timer.daemon = True
timer.start()
for answer in ("ready", "done"):
    print("x" * 2**20, file=sys.stderr, flush=True)
    print(answer, flush=True)
    input()
"""


def test_a_program_that_says_much_on_stderr_is_not_held_up():
    with Team([[sys.executable, "-c", TALKS]]) as team:
        assert team.ready == ["ready"] and team() == ["done"]
