"""The doctor finds out what is broken, before set-up and after it, and says what to do.

It runs in a copy of the files that it looks at; what stands in for the environment's Python is this
one, which can be tampered with.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin
from test_setup import environment_by_hand, snapshot, write_script

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "requirements/doctor.py"
BASE_PYTHON = sys._base_executable
ANEW = "delete .venv, then `make setup`"


@pytest.fixture
def copy(tmp_path):
    """The repository as it is cloned, as far as the doctor looks at it."""
    folder = tmp_path / "a course"
    for name in ("requirements", "helpers", "notebooks/assignments/marking"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


# In place of the environment's Python: runs `before` first.
PYTHON = """\
#!/bin/sh
exec "{python}" {flags} -c 'import sys
sys.path.insert(0, "helpers/..")
exec(open(".venv/before").read())
exec(sys.argv[-1])' "$@"
"""


def set_up(folder, before="", python=sys.executable, flags="", mxnet=""):
    """As `make setup` leaves it. In place of MXNet, which takes its time, `mxnet`; None: itself."""
    write_script(folder / ".venv/bin/python", PYTHON.format(python=python, flags=flags))
    (folder / ".venv/before").write_text(before)
    if mxnet is not None:
        (folder / "mxnet.py").write_text(mxnet)
    with open(folder / "requirements/cpu.txt") as lock:
        sum_ = subprocess.run(["cksum"], stdin=lock, capture_output=True, text=True).stdout
    (folder / ".venv/.many-devices").write_text(f"cpu none {folder.resolve()} {sum_}")


def doctor(folder, *, before="", **environment):
    """Run it after the code `before`; (exit status, {name: (mark, finding, remedy)}, last line)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((
        "COURSE", "PYTHON", "TORCH"))}
    environment = {"GPU": "0", "PYTHON": BASE_PYTHON,
                   "PATH": f"{folder}/bin:{os.environ['PATH']}", **environment}
    done = subprocess.run(
        [BASE_PYTHON, "-c", f"import runpy\n{before}\n"
         "runpy.run_path('requirements/doctor.py', run_name='__main__')"],
        cwd=folder, capture_output=True, text=True, timeout=200, env={**kept, **environment})
    *lines, last = done.stdout.splitlines() or [done.stderr]
    rows, name = {}, None
    for line in lines:
        if line.startswith(" "):
            rows[name] = (*rows[name][:2], line.strip(" →"))
        else:
            mark, name, found = line[0], line[2:13].strip(), line[14:]
            rows[name] = (mark, found, "")
    return done.returncode, rows, last


# --- Before set-up ------------------------------------------------------------------------------


def test_before_set_up_it_says_that_nothing_is_in_the_way_and_changes_nothing(copy):
    before = snapshot(copy)
    status, rows, last = doctor(copy)
    assert status == 0 and "not set up yet" in last
    assert rows["set-up"][:2] == ("–", ".venv is not made yet")
    assert "MXNet" not in rows and "✗" not in {mark for mark, *_ in rows.values()}
    assert snapshot(copy) == before


@pytest.mark.parametrize("missing", ["libgomp.so.1", "libquadmath.so.0"])
def test_a_system_library_is_missing(copy, missing):
    status, rows, _ = doctor(copy, before=f"""
import ctypes
def load(name, *_):
    if name == "{missing}":
        raise OSError(name)
ctypes.CDLL = load""")
    assert status == 1
    assert rows["libraries"][:2] == ("✗", f"no {missing}") and "libgomp1" in rows["libraries"][2]


@pytest.mark.parametrize("ready, gpu, needs", [
    (False, "0", 1.4), (False, "1", 5.4), (True, "0", 0.1)])
def test_a_disk_is_held_to_what_is_still_to_come(copy, ready, gpu, needs):
    if ready:
        set_up(copy)
    for more, mark in ((-0.05, "✗"), (5.9, "–"), (6.1, "✓")):
        status, rows, _ = doctor(copy, GPU=gpu, before=f"""
import shutil
from collections import namedtuple
shutil.disk_usage = lambda _: namedtuple("Usage", "free")({needs + more} * 10**9)""")
        assert rows["disk"][0] == mark
        assert status == 1 or mark != "✗"


def test_an_environment_that_set_up_did_not_make(copy):
    environment_by_hand(copy)
    before = snapshot(copy)
    status, rows, _ = doctor(copy)
    assert status == 1
    assert rows["set-up"][0] == "✗" and rows["set-up"][2] == "move it away or delete it"
    assert snapshot(copy) == before


def test_an_environment_that_is_not_up_to_date(copy):
    set_up(copy)
    with open(copy / "requirements/cpu.txt", "a") as lock:
        lock.write("# newer\n")
    status, rows, _ = doctor(copy)
    assert status == 0
    assert rows["set-up"][:2] == ("–", ".venv is unfinished or out of date")


def test_a_wrong_choice_of_build(copy):
    status, rows, _ = doctor(copy, GPU="yes")
    assert status == 1 and "GPU=yes: must be 1" in rows["set-up"][1]


def test_any_python_from_3_8_on_can_read_it():
    """Its syntax; set-up runs gpu.py with any Python too."""
    for path in (DOCTOR, ROOT / "helpers/gpu.py"):
        ast.parse(path.read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("cards, words", [
    (["NVIDIA H200|9|0|143771"], "5.0 to 8.9 only"), (["NVIDIA A100|8|0|40960"], "GPU=1"),
    ([], "CPU cores")])
def test_cards_are_named_and_what_becomes_of_them(copy, tmp_path, cards, words):
    environment = standin.environment(standin.driver(tmp_path), *cards)
    _, rows, _ = doctor(copy, CARDS=environment["CARDS"],
                        LD_LIBRARY_PATH=environment["LD_LIBRARY_PATH"])
    assert rows["GPUs"][0] == "–" and words in rows["GPUs"][2]
    assert all(card.split("|")[0] in rows["GPUs"][1] for card in cards)


# --- After set-up -------------------------------------------------------------------------------


def test_here_the_course_can_run(copy):
    set_up(copy, mxnet=None)
    before = snapshot(copy)
    status, rows, last = doctor(copy)
    assert (status, last) == (0, "The course can run here."), rows
    assert rows["set-up"] == ("✓", "up to date", "")
    assert rows["MXNet"][0] == "✓" and rows["MXNet"][1].startswith("1.9.1 with")
    assert int(rows["cores"][1]) >= 1
    assert snapshot(copy) == before


@pytest.mark.parametrize("fault, told", [
    ("raise AttributeError('module numpy has no attribute bool')", "no attribute bool"),
    ("import os; os.kill(os.getpid(), 11)", "ended with -11")])
def test_an_mxnet_that_breaks_is_no_end_of_the_doctor(copy, fault, told):
    set_up(copy, mxnet=fault)
    status, rows, _ = doctor(copy)
    assert status == 1
    assert rows["MXNet"][0] == "✗" and told in rows["MXNet"][1] and rows["MXNet"][2] == ANEW
    assert rows["grading"][0] in "✓–", "the lines after it are there"


def test_a_gpu_build_without_a_driver_is_explained(copy):
    set_up(copy, mxnet="raise OSError('libcuda.so.1: cannot open shared object file')")
    status, rows, _ = doctor(copy)
    assert status == 1
    assert "no NVIDIA driver" in rows["MXNet"][2] and "GPU=0" in rows["MXNet"][2]


def test_without_any_package_every_line_says_what_to_do(copy):
    # The Python below this environment, without its own packages either.
    set_up(copy, python=BASE_PYTHON, flags="-S")
    status, rows, _ = doctor(copy)
    assert status == 1
    assert rows["MXNet"][0] == "✗" and rows["MXNet"][2] == ANEW
    assert rows["PyTorch"] == (
        "–", "not installed", "chapters 13 to 20 need it: `make setup TORCH=1`")


@pytest.mark.parametrize("in_cache", [True, False])
def test_course_data_that_is_not_used_has_no_tick(copy, in_cache):
    """It looks right from outside; `load_data` would refuse it, and take what is elsewhere."""
    damaged = copy / "data/mnist/train-images-idx3-ubyte.gz"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("damaged")
    set_up(copy, """
from helpers import data
data._look_in_cache = lambda file: None
""" if in_cache else "")
    before = snapshot(copy)
    place = str(copy / "data")
    _, rows, _ = doctor(copy, HOME=str(copy), XDG_CACHE_HOME=str(copy), COURSE_DATA=place)
    ticks = [name for name, (mark, found, _) in rows.items()
             if mark == "✓" and ("DATA" in name or place in found)]
    assert not ticks and rows["data"][0] == "–"
    assert rows["data"][1].startswith(f"COURSE_DATA={place} ")
    assert "or unset COURSE_DATA" in rows["data"][2]
    assert snapshot(copy) == before, "nor is anything moved or set aside"
    _, rows, _ = doctor(copy, HOME=str(copy), XDG_CACHE_HOME=str(copy))
    assert rows["data"][0] == ("✓" if in_cache else "–")


# In place of bubblewrap: refuses the option that is named, as some machines do.
BWRAP = """#!/bin/sh
case " $* " in *" {refused} "*) exit 1 ;; esac
"""


@pytest.mark.parametrize("refused, mark", [("nothing", "✓"), ("--proc", "–")])
def test_bubblewrap_is_held_to_what_marking_asks_of_it(copy, refused, mark):
    set_up(copy)
    write_script(copy / "bin/bwrap", BWRAP.format(refused=refused))
    _, rows, _ = doctor(copy)
    assert rows["grading"][0] == mark
