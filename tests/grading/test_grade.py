"""`make grade`, whole: good, empty, broken and hostile submissions in one folder, as a teacher
has them. Each must end as stated, and none may change what another earns."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

import judge
import sandbox

REPOSITORY = Path(__file__).resolve().parents[2]
FULL = {"even-values": 2, "even-care": 2, "uneven-values": 2, "uneven-care": 1,
        "pairs-values": 2, "pairs-care": 1}  # fmt: skip

# In place of the first exercise's solution. What the other two exercises earn shows that a
# cell harms only its own. After the bar: what is said of the first one's tests.
HOSTILE = {
    "loop": ("while True: pass", "worked for more than 20 seconds"),
    "sleep": ("import time\ntime.sleep(10**6)", "not done after 60 seconds"),
    "stop": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "not done after 60"),
    "dead-kernel": ("import os\nos._exit(0)", "ended by itself, with exit status 0"),
    "exit": ("import sys\nsys.exit()", "ended by itself"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "ended by itself, with exit status"),
    "memory": ("kept = []\nwhile True: kept.append(bytearray(b'x') * 10**7)",
               "more than 2 GiB of memory|MemoryError"),
    "huge-output": ("while True: print('x' * 10**4)", "printed more than 5 MB"),
    "many-processes": (
        "import subprocess, sys\n"
        "kept = [subprocess.Popen(['sleep', '60']) for _ in range(40)]\n"
        "import time\ntime.sleep(5)", "more than 8 processes"),
    "transformers": ("get_ipython().input_transformers_cleanup.append(lambda l: ['pass'])",
                     "NameError"),
    "patched-numpy": (
        "import builtins, sys, numpy.testing\n"
        "numpy.testing.assert_array_equal = lambda *a, **k: None\n"
        "builtins.AssertionError = KeyboardInterrupt\n"
        "np.ndarray = object\nimport helpers, wire\nhelpers.devices = wire.write = None\n"
        "def split_even(batch, devices): return [batch] * len(devices)", "."),
    "always-equal": (
        "class Yes:\n"
        "    def __eq__(self, other): return True\n"
        "    def __len__(self): return 2\n"
        "    context = shape = dtype = property(lambda self: Yes())\n"
        "def split_even(batch, devices): return [Yes(), Yes()]", "Yes; arrays, numbers"),
    "forged": (   # speaks to the judge by itself
        "import os, struct, json\n"
        "text = json.dumps({'tree': {'list': [['__import__']]}, 'arrays': []}).encode()\n"
        "for fd in range(3, 30):\n"
        "    try: os.write(fd, struct.pack('<QQ', len(text), 0) + text)\n"
        "    except OSError: pass", "."),
    "endless-message": (
        "import os, struct\n"
        "for fd in range(3, 30):\n"
        "    try: os.write(fd, struct.pack('<QQ', 2**62, 2**62))\n"
        "    except OSError: pass", "a message of"),
}
NEEDS_WALLS = {   # what only bubblewrap keeps from a solution: it says what it could reach
    "reads-tests": (
        "import glob\nseen = glob.glob('{repository}/notebooks/**/*.py', recursive=True)\n"
        "raise ValueError(f'sees {{len(seen)}} files')", "sees 0 files"),
    "reads-gradebook": (
        "import os\nraise ValueError('gradebook ' + str(os.path.exists('{out}/gradebook.db')))",
        "gradebook False"),
    "network": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 3)\n"
        "except OSError: raise ValueError('no way out')\nraise ValueError('connected')",
        "no way out"),
    "writes-outside": (
        "denied = 0\n"
        "for path in ('{out}.txt', '{repository}/README.md', '/usr/x', '/course/x'):\n"
        "    try: open(path, 'a').write('a solution was here')\n"
        "    except OSError: denied += path in ('/usr/x', '/course/x')\n"
        "raise ValueError(f'{{denied}} of 2 denied')", "2 of 2 denied"),
    "sees-processes": (
        "import os\nraise ValueError(f\"{{sum(p.isdigit() for p in os.listdir('/proc'))}} seen\")",
        "(1|2|3|4) seen"),
}
LEAVES = ("leaves-processes",
          "import subprocess\n"
          "subprocess.Popen(['sh', '-c', 'setsid sleep 7777 & exit'])", "NameError")


def source(name="ps1"):
    """The source version: model answers in all solution cells."""
    return judge.notebook(name)


def with_first_solution(code):
    content = source()
    for cell in content.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == "even":
            cell.source = code
    return content


def put(folder, student, content, name="ps1.ipynb"):
    path = folder / student / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    else:
        nbformat.write(content, path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Every submission graded in one run; (rows by student, the run's output, folder, seconds)."""
    root = tmp_path_factory.mktemp("course")
    folder, out = root / "handed-in", root / "handed-in-marks"
    out.with_suffix(".txt").write_text("outside")
    listener = socket.create_server(("127.0.0.1", 0))
    subprocess.run([sys.executable, REPOSITORY / "notebooks/assignments/release.py",
                    root / "released"], check=True, capture_output=True)
    released = nbformat.read(root / "released/release/ps1/ps1.ipynb", 4)

    put(folder, "model", source())
    put(folder, "nbgraders-layout", source(), "ps1/ps1.ipynb")
    put(folder, "untouched", released)
    everything = [*HOSTILE.items(), (LEAVES[0], LEAVES[1:])]
    everything += NEEDS_WALLS.items() if sandbox.bubblewrap() else []
    for student, (code, _) in everything:
        if student in NEEDS_WALLS:
            code = code.format(repository=REPOSITORY, out=out, port=listener.getsockname()[1])
        put(folder, student, with_first_solution(code))

    put(folder, "not-json", "{not json")
    put(folder, "a-list", "[1, 2]")
    old = json.loads(json.dumps(nbformat.convert(source(), 3)))
    put(folder, "older-format", json.dumps(old))
    (folder / "missing").mkdir()
    edited = source()
    for cell in edited.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.source = "pass"
    edited.cells = [c for c in edited.cells
                    if c.metadata.get("nbgrader", {}).get("grade_id") != "pairs-values"]
    put(folder, "edited-tests", edited)
    put(folder, "edited-tests-and-wrong", with_first_solution("def split_even(b, d): return [b]"))
    renamed = source()
    for cell in renamed.cells:
        cell.source = cell.source.replace("def split_even", "def split_evenly")
    put(folder, "renamed", renamed)
    gone = source()
    gone.cells = [c for c in gone.cells if c.metadata.get("nbgrader", {}).get("grade_id") != "even"]
    put(folder, "no-solution-cell", gone)
    twice = source()
    copy = nbformat.from_dict(json.loads(json.dumps(
        next(c for c in twice.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "even"))))
    copy.source, copy.id = "def split_even(batch, devices): return []", "copy"
    twice.cells.append(copy)
    put(folder, "two-solution-cells", twice)

    begin = time.monotonic()
    done = subprocess.run(["make", "grade", f"SUBMISSIONS={folder}"], cwd=REPOSITORY, text=True,
                          capture_output=True, env={**os.environ, "SECRET": "mark-my-words"})
    seconds = time.monotonic() - begin
    listener.close()
    rows = {}
    if (out / "marks.csv").exists():
        with open(out / "marks.csv", newline="") as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["student"], {})[row["exercise"]] = row
    yield rows, done, out, seconds
    shutil.rmtree(root)


def points(rows, student):
    return {name: float(row["points"]) for name, row in rows[student].items() if row["points"]}


def without_first():
    return {**FULL, "even-values": 0, "even-care": 0}


def test_the_run_ends_well_and_says_how_long_it_took(run, capsys):
    rows, done, out, seconds = run
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print(f"\n{len(rows)} submissions graded in {seconds:.0f} s, "
              f"{seconds / len(rows):.1f} s each; hostile or broken: {len(rows) - 3}")


@pytest.mark.parametrize("student", ["model", "nbgraders-layout", "edited-tests", "older-format"])
def test_full_marks_for_what_is_right_whatever_else_is_in_the_notebook(run, student):
    assert points(run[0], student) == FULL


def test_an_untouched_student_version_earns_nothing(run):
    assert points(run[0], "untouched") == dict.fromkeys(FULL, 0)
    assert "not written yet" in run[0]["untouched"]["even-values"]["why not"]


@pytest.mark.parametrize("student", [*HOSTILE, LEAVES[0]])
def test_a_hostile_solution_costs_its_own_exercise_and_nothing_else(run, student):
    pattern = dict([*HOSTILE.items(), (LEAVES[0], LEAVES[1:])])[student][1]
    assert points(run[0], student) == without_first()
    import re
    assert re.search(pattern, run[0][student]["even-values"]["why not"])


@pytest.mark.parametrize("student", NEEDS_WALLS)
def test_a_solution_reaches_nothing_but_its_folder(run, student):
    if not sandbox.bubblewrap():
        pytest.skip("bubblewrap is not here, or not permitted: nothing keeps a solution in")
    import re
    assert points(run[0], student) == without_first()
    assert re.search(NEEDS_WALLS[student][1], run[0][student]["even-values"]["why not"])


def test_what_a_solution_writes_never_arrives_outside(run):
    """A path under /tmp may exist in its own, empty /tmp: what counts is the file out here."""
    if not sandbox.bubblewrap():
        pytest.skip("bubblewrap is not here, or not permitted: nothing keeps a solution in")
    assert run[2].with_suffix(".txt").read_text() == "outside"
    assert "a solution was here" not in (REPOSITORY / "README.md").read_text()
    assert not Path("/usr/x").exists()


@pytest.mark.parametrize("student, why", [
    ("not-json", "not a notebook"), ("a-list", "not a notebook"),
    ("missing", "not handed in"), ("two-solution-cells", "two different solution cells 'even'")])
def test_what_cannot_be_read_earns_nothing_and_says_why(run, student, why):
    assert points(run[0], student) == dict.fromkeys(FULL, 0)
    assert why in run[0][student]["even-values"]["why not"]


@pytest.mark.parametrize("student, why", [
    ("renamed", "split_even is not defined"), ("no-solution-cell", "'even' is missing"),
    ("edited-tests-and-wrong", "1 shards for two devices")])
def test_one_exercise_lost(run, student, why):
    assert points(run[0], student) == without_first()
    assert why in run[0][student]["even-values"]["why not"]


def test_nothing_is_left_behind(run):
    left = [p for p in psutil.process_iter(["cmdline"]) if "7777" in (p.info["cmdline"] or [])]
    assert not left


def test_words_wait_for_a_reader(run):
    row = run[0]["model"]["why"]
    assert (row["points"], row["of"], row["why not"]) == ("", "2", "to be read")


def test_feedback_has_marks_and_reasons_and_no_hidden_test(run):
    rows, _, out, _ = run
    for student in rows:
        page = (out / "feedback" / student / "ps1/ps1.html").read_text()
        assert "HIDDEN TESTS" not in page and "default_rng" not in page
    page = (out / "feedback/renamed/ps1/ps1.html").read_text()
    assert "0 of 2 points" in page and "split_even is not defined" in page


def test_marks_given_by_a_person_are_kept(run):
    from nbgrader.api import Gradebook

    out = run[2]
    with Gradebook(f"sqlite:///{out}/gradebook.db") as book:
        book.find_grade("why", "ps1", "ps1", "model").manual_score = 1.5
        book.db.commit()
    again = out.parent / "again"
    shutil.copytree(out.parent / "handed-in/model", again / "model")
    done = subprocess.run(["make", "grade", f"SUBMISSIONS={again}", f"OUT={out}"],
                          cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "model  ps1  11.5 of 12" in done.stdout
