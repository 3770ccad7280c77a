"""What `in_turns` runs, keeps and prints; whom `Others` counts; programs and new processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import timing
from helpers.timing import Others, Spread, Team, in_turns, print_times, race, spread


class Process:
    """In the place of psutil's: user, system, and those of children that have ended."""

    def __init__(self, used, children=()):
        self.used, self.living = used, list(children)

    def cpu_times(self):
        return self.used

    def children(self, recursive):
        return self.living


def test_others_are_all_but_us_and_our_processes(monkeypatch):
    """In 100 s of the machine 40 were idle; we used 30, of which 5 by a child that has ended."""
    class Times(SimpleNamespace):
        def _asdict(self):
            return vars(self)

    before = Times(user=10.0, nice=1.0, system=2.0, idle=50.0, iowait=3.0, steal=0.5, guest=9.0)
    after = Times(user=50.0, nice=3.0, system=14.0, idle=80.0, iowait=13.0, steal=6.5, guest=40.0)
    readings = iter([
        (before, Process((5.0, 1.0, 0.0, 0.0), [Process((1.0, 0.0, 0.0, 0.0))])),
        (after, Process((15.0, 3.0, 4.0, 1.0), [Process((13.0, 1.0, 0.0, 0.0))]))])

    def cpu_times():
        now, ours = next(readings)
        psutil.Process = lambda: ours
        return now

    psutil = SimpleNamespace(cpu_times=cpu_times, NoSuchProcess=ProcessLookupError)
    monkeypatch.setattr(timing, "psutil", psutil)
    with Others() as others:
        pass
    assert others.share == pytest.approx((100 - 40 - 30) / 100)


# ---- in turns ----


def noting(log, *names):
    """Contestants that note when they run, and a wait that notes itself."""
    def contestant(name):
        return lambda: log.append(name)
    return {name: contestant(name) for name in names}, lambda: log.append("wait")


def test_each_round_runs_every_contestant_once_between_two_waits_in_an_order_of_its_own():
    logs = []
    for seed in (0, 0, 1):
        log = []
        contestants, wait = noting(log, "a", "b", "c")
        times = in_turns(contestants, rounds=5, warm_up=2, wait=wait, seed=seed)
        assert {name: len(seconds) for name, seconds in times.items()} == {"a": 5, "b": 5, "c": 5}
        rounds = [log[begin:begin + 9] for begin in range(0, len(log), 9)]
        assert len(rounds) == 7
        for part in rounds:
            assert part[0::3] == part[2::3] == ["wait"] * 3
            assert sorted(part[1::3]) == ["a", "b", "c"]
        assert len(set(map(tuple, rounds))) > 1, "the order must change"
        logs.append(log)
    assert logs[0] == logs[1] != logs[2]


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


@pytest.mark.parametrize(("rounds", "shares", "kept", "said"), [
    (3, [0, 0, 0], 3, ""),
    (3, [0, 0.5, 0, 0], 3, "1 of 4 rounds left out: others used more than 2% of the machine"),
    (3, [0, 0.5, 0.5, 0, 0.5, 0.5], 6, "only 2 of 6 rounds were quiet, so all are used"),
    (2, [0, 0.5, 0], 2, "1 of 3 rounds left out")])
def test_a_disturbed_round_is_taken_again(monkeypatch, capsys, rounds, shares, kept, said):
    Disturbed.shares = iter(shares)
    monkeypatch.setattr(timing, "Others", Disturbed)
    ran = []
    found = in_turns({"a": lambda: ran.append(1)}, rounds=rounds, warm_up=0, quiet=0.02,
                     wait=lambda: None)["a"]
    assert len(ran) == len(shares) and len(found) == kept
    printed = capsys.readouterr().out
    assert said in printed and bool(said) == bool(printed)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"contestants": {}, "rounds": 3}, "contestants={}"),
    ({"contestants": {"a": print}, "rounds": 0}, "rounds=0"),
    ({"contestants": {"a": print}, "rounds": 3, "warm_up": -1}, "warm_up=-1"),
])
def test_nothing_to_measure_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        in_turns(**arguments)


def test_spread_is_numpys_quartiles_and_printed_a_row_a_name(capsys):
    seconds = [5, 1, 4, 2, 3]
    assert spread(seconds) == Spread(*np.percentile(seconds, [25, 50, 75])) == (2, 3, 4)
    with pytest.raises(ValueError, match="at least one"):
        spread([])
    print_times({"a": np.array([1e-3, 2e-3, 3e-3]), "longer": np.array([0.5] * 3)})
    assert capsys.readouterr().out.splitlines() == [
        "a             2 ms  (1.5 to 2.5)", "longer      500 ms  (500 to 500)"]
    print_times({"a": np.array([4e-6] * 3)}, unit="µs")
    assert capsys.readouterr().out == "a        4 µs  (4 to 4)\n"
    with pytest.raises(ValueError, match="unit='min'"):
        print_times({}, unit="min")


# ---- in new processes ----

PROGRAM = """
import os, sys
from helpers.timing import in_new_processes

FACTOR = 3

def doubled(x):
    return 2 * x

def work(x):
    if x == 2:
        raise KeyError("planted")
    print("not to be seen")
    left = os.environ.get("LEFT")
    os.environ["LEFT"] = "here"
    return os.getpid(), doubled(x) * FACTOR, left, "helpers" in sys.modules

if __name__ == "__main__":
    found = in_new_processes(work, range(2))
    assert len({pid for pid, *_ in found} | {os.getpid()}) == 3, "processes of their own"
    assert [rest for _, *rest in found] == [[0, None, True], [6, None, True]], found
    for pid, *_ in found:
        assert not os.path.exists(f"/proc/{pid}"), "it must have ended"
    try:
        in_new_processes(work, [2])
    except KeyError as error:
        print("raised here:", error)
"""


def test_each_call_has_a_process_of_its_own(tmp_path):
    """As from a notebook: the functions are those of `__main__`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(root)})
    assert (done.returncode, done.stdout) == (0, "raised here: 'planted'\n"), done.stderr


# ---- programs that work when they are told to ----

# It says more on stderr than a pipe holds, and answers when all three have begun.
PROGRAMS = """
import os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
print("x" * 2**20, file=sys.stderr, flush=True)
print("ready", name, flush=True)
for line in sys.stdin:
    if line.strip() == "fail":
        sys.exit("on purpose")
    (folder / name).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    print(os.environ["WHO"], line.strip(), len(list(folder.iterdir())), flush=True)
"""


def test_a_teams_programs_work_at_the_same_time_with_its_order_and_environment(tmp_path):
    """One after the other, the first would wait in vain for the others."""
    commands = [[sys.executable, "-c", PROGRAMS, tmp_path, name] for name in "abc"]
    with Team(commands, "6", os.environ | {"WHO": "me"}) as team:
        assert team.ready == ["ready a", "ready b", "ready c"]
        assert team() == team() == ["me 6 3"] * 3
        programs = team._programs
    assert all(program.poll() is not None for program, _ in programs), "ended"


@pytest.mark.parametrize("code", [PROGRAMS, "raise SystemExit('on purpose')"])
def test_a_program_that_ends_is_reported_with_its_words(code, tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        with Team([[sys.executable, "-c", code, tmp_path, "a"]], "fail") as team:
            team()


def test_a_race_runs_each_program_so_many_steps_in_each_round(tmp_path, monkeypatch):
    """A name with two lines has two programs; warm-up and rounds are those of in_turns."""
    program = tmp_path / "contestant.py"
    program.write_text("import os, sys\nprint('ready', flush=True)\nfor line in sys.stdin:\n"
                       "    with open(sys.argv[1], 'a') as log:\n"
                       "        log.write(os.environ.get('WHO', '') + line)\n"
                       "    print('done', flush=True)\n")
    monkeypatch.setattr(timing, "Others", Disturbed)
    Disturbed.shares = iter([0, 0, 0])
    lines = {name: f"'{program}' '{tmp_path / name}'" for name in "abc"}
    times = race({"a": lines["a"], "both": [lines["b"], lines["c"]]}, steps=7, rounds=3,
                 environments={"both": os.environ | {"WHO": "we "}})
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "both": 3}
    found = {name: (tmp_path / name).read_text() for name in "abc"}
    assert found == {"a": "7\n" * 5, "b": "we 7\n" * 5, "c": "we 7\n" * 5}
