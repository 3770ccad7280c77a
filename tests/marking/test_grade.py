"""`make grade`, whole: good, empty, broken and strange submissions in one folder, as a teacher has
them. Each must end as stated, and none may change what another earns."""

import contextlib
import csv
import html
import importlib.util
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import types

import nbformat
import psutil
import pytest
from marking import assignment, files, gradebook, grade, harmless, judge, notebook, process

from hand_in import REPOSITORY, make_source, put, run_make

FULL = {"even-values": 2, "even-care": 2, "uneven-values": 2, "uneven-care": 1,
        "pairs-values": 2, "pairs-care": 1}  # fmt: skip
SCRIPT = """Words <script>document.title = 'stolen'</script>
<img src=x onerror="document.title='stolen'">
[a](javascript:alert(1)) ![b](http://127.0.0.1:9/spy.png) <javascript:alert(1)>

<iframe srcdoc="<script>parent.document.title='stolen'</script>"></iframe>
$\\href{javascript:alert(1)}{x}$
</pre><script>document.title = 'stolen'</script>
"""
FORMULA = "=HYPERLINK(\"http://127.0.0.1/\", \"click\")"


def read_rows(out):
    rows = {}
    with open(out / "marks.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["student"], {})[row["exercise"]] = row
    return rows


def points(rows, student):
    return {name: float(row["points"]) for name, row in rows[student].items() if row["points"]}


def without_first():
    return {**FULL, "even-values": 0, "even-care": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Every submission graded in one run: (rows by student, the run's output, folder)."""
    root = tmp_path_factory.mktemp("a course, and 'more'")
    folder, out = root / "handed-in", root / "handed-in-marks"
    subprocess.run([sys.executable, "-m", "marking", "release", root / "released"], check=True,
                   capture_output=True, cwd=REPOSITORY / "notebooks/assignments")
    put(folder, "model", make_source())
    put(folder, "O'Brien, Ümit", make_source(), "ps1/ps1.ipynb")
    put(folder, "untouched", nbformat.read(root / "released/release/ps1/ps1.ipynb", 4))
    put(folder, "not-json", "{not json")
    put(folder, "a-list", "[1, 2]")
    put(folder, "nested", "[" * 10**6)
    put(folder, "older-format", json.dumps(nbformat.convert(make_source(), 3)))
    (folder / "missing").mkdir()
    edited = make_source()
    for cell in edited.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.source = "pass"
    edited.cells = [c for c in edited.cells
                    if c.metadata.get("nbgrader", {}).get("grade_id") != "pairs-values"]
    put(folder, "edited-tests", edited)
    put(folder, "wrong", make_source(even="def split_even(b, d): return [b]"))
    put(folder, "renamed", make_source(even="def split_evenly(batch, devices): return []"))
    gone = make_source()
    gone.cells = [c for c in gone.cells if c.metadata.get("nbgrader", {}).get("grade_id") != "even"]
    put(folder, "no-solution-cell", gone)
    twice = json.loads(json.dumps(make_source()))
    twice["cells"].append({**next(c for c in twice["cells"] if c["metadata"].get(
        "nbgrader", {}).get("grade_id") == "even"), "source": "pass"})
    put(folder, "two-solution-cells", json.dumps(twice))
    put(folder, "script", make_source(
        why=SCRIPT, even="# </pre><script>document.title = 'stolen'</script>\n"
        "def split_even(batch, devices): raise KeyError('\\x1b[31m<b>\\r=1+1')"))
    put(folder, "surrogate", make_source(why="half of a \ud800 character \x00 \x1b[31m",
                                         even="x = '\ud800'"))
    put(folder, "reason", make_source(even="def split_even(batch, devices):\n"
                                      "    raise ValueError(chr(0xd800) + chr(0x202e) + chr(0))"))
    put(folder, "long", make_source(even="#" + "x" * notebook.LONGEST, why='"' * 10**6))
    put(folder, "cut-in-two", make_source())
    (folder / "cut-in-two/ps1 (1).ipynb").touch()
    put(folder, FORMULA.replace('"', "'").replace("/", "."), make_source())
    # Files that are none, and folders that can't be used.
    os.symlink("../model/ps1.ipynb", put(folder, "link", "").parent / "ps2.ipynb")
    os.remove(folder / "link/ps1.ipynb")
    os.rename(folder / "link/ps2.ipynb", folder / "link/ps1.ipynb")
    (folder / "linked-folder").mkdir()
    os.symlink("../model", folder / "linked-folder/ps1")
    os.symlink("model", folder / "is-a-link")
    (folder / "zero").mkdir()
    os.symlink("/dev/zero", folder / "zero/ps1.ipynb")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe/ps1.ipynb")
    (folder / "directory/ps1.ipynb").mkdir(parents=True)
    with open(put(folder, "large", ""), "wb") as file:
        file.truncate(files.LARGEST + 1)
    put(folder, "new\nline", make_source())
    put(folder, "red\x1b[31m", make_source())
    put(folder, "twice", make_source())
    put(folder, "twice", make_source(), "ps1/ps1.ipynb")
    put(folder, "<img src=x onerror=alert(1)>", make_source())
    begin = time.monotonic()
    done = run_make(folder, SECRET="mark-my-words")
    done.seconds = time.monotonic() - begin
    yield read_rows(out), done, out
    shutil.rmtree(root)


def test_the_run_says_how_long_it_took_and_what_was_not_judged(run, capsys):
    rows, done, _ = run
    assert done.returncode != 0 and "Not judged:" in done.stdout   # the two folders below
    with capsys.disabled():
        print(f"\n{len(rows)} submissions graded in {done.seconds:.0f} s")


@pytest.mark.parametrize("student", ["model", "O'Brien, Ümit", "edited-tests", "older-format"])
def test_full_marks_for_what_is_right_whatever_else_is_in_the_notebook(run, student):
    assert points(run[0], student) == FULL


def test_an_untouched_student_version_earns_nothing(run):
    assert points(run[0], "untouched") == {**dict.fromkeys(FULL, 0), "why": 0}
    assert run[0]["untouched"]["why"]["why not"] == "no answer"
    row = run[0]["untouched"]["even-values"]
    assert (row["why not"], row["outcome"]) == ("'even' is not written yet", "judged")
    lines = run[1].stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("untouched "))
    assert [line.split(": ")[-1] for line in lines[place + 1:place + 5]] == [
        *(f"'{name}' is not written yet" for name in ("even", "uneven", "pairs")), "no answer"]


@pytest.mark.parametrize("student, why", [
    ("not-json", "not a notebook"), ("a-list", "not a notebook"), ("nested", "not a notebook"),
    ("missing", "not handed in"), ("link", "ps1.ipynb is a link"),
    ("linked-folder", "ps1 is a link"),
    ("zero", "ps1.ipynb is a link"), ("pipe", "not a regular file"),
    ("directory", "not a regular file"), ("large", "larger than 64 MiB")])
def test_what_cannot_be_read_earns_nothing_and_says_why(run, student, why):
    assert points(run[0], student) == {**dict.fromkeys(FULL, 0), "why": 0}
    assert why in run[0][student]["even-values"]["why not"]
    assert why in run[0][student]["why"]["why not"]   # not "no answer"
    page = (run[2] / "feedback" / student / "ps1/ps1.html").read_text()
    assert why in html.unescape(page)   # not only in the table


@pytest.mark.parametrize("student, why", [
    ("two-solution-cells", "'even' was split into 2 cells: join them"),
    ("renamed", "split_even is not defined"), ("no-solution-cell", "'even' is missing"),
    ("wrong", "has 1 entry, not 2"), ("script", "KeyError"), ("surrogate", "Unicode"),
    ("reason", "ValueError: ?"), ("long", "more than 300,000 characters")])
def test_one_exercise_lost(run, student, why):
    assert points(run[0], student) == without_first()
    assert why in run[0][student]["even-values"]["why not"]


@pytest.mark.parametrize("student, shown, why", [
    ("is-a-link", "is-a-link", "it is a link"),
    ("new\nline", "new\\nline", "can't be printed"),
    ("red\x1b[31m", "red\\x1b[31m", "can't be printed"), ("twice", "twice", "it has two of ps1"),
    ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>", "it has one of <")])
def test_folders_that_cannot_be_used_are_named_first_and_have_rows(run, student, shown, why):
    rows, done, out = run
    assert f"The folder '{shown}' can't be used: " in done.stderr
    assert all(row["points"] == "" and row["outcome"] == "not judged" and why in row["why not"]
               for row in rows[shown].values())
    assert not (out / "feedback" / student).exists()


def test_nothing_that_is_shown_or_stored_can_do_anything(run):
    rows, done, out = run
    for text in (done.stdout, done.stderr, (out / "marks.csv").read_text()):
        assert "\x1b" not in text and "\x00" not in text
    cells = [cell for row in csv.reader(open(out / "marks.csv", newline="")) for cell in row]
    assert not [cell for cell in cells if cell.lstrip().startswith(("=", "+", "@"))]
    assert "'" + FORMULA.replace('"', "'").replace("/", ".") in cells
    page = (out / "feedback/script/ps1/ps1.html").read_text()
    shown = nbformat.read(out / "autograded/script/ps1/ps1.ipynb", 4)
    (answer,) = (c.source for c in shown.cells
                 if c.metadata.get("nbgrader", {}).get("grade_id") == "why")
    for text in (page.partition("</style>")[2], answer):
        assert "stolen" in text                      # it is there, to be read,
        for tag in ("<script", "<img", "<iframe", "<javascript", "<a href=\"java"):
            assert tag not in text                   # and nothing of it is HTML
    assert answer.startswith("<pre ") and answer.count("<") == 2
    assert "�" in (out / "feedback/surrogate/ps1/ps1.html").read_text()


def test_notebooks_that_are_not_read_are_named(run):
    said = "cut-in-two/ps1 (1).ipynb: ps1.ipynb is what was read"
    assert f"Not read: {said}" in run[1].stderr and f"Not read:\n  {said}\n" in run[1].stdout
    assert run[0]["cut-in-two"][""]["outcome"] == "not read"
    page = (run[2] / "feedback/cut-in-two/ps1/ps1.html").read_text()
    assert "Not read: ps1 (1).ipynb: ps1.ipynb is what was read" in page


def test_a_long_answer_is_shown_in_part(run):
    assert (run[2] / "feedback/long/ps1/ps1.html").stat().st_size < 2 * 10**6


def test_words_wait_for_a_reader(run):
    row = run[0]["model"]["why"]
    assert [row[c] for c in ("points", "of", "why not", "outcome")] == [
        "", "2", "to be read", "to be read"]
    page = (run[2] / "feedback/model/ps1/ps1.html").read_text()
    assert "10 of 10 points" in page and "2 more to be read" in page


def test_totals_are_what_one_enters(run):
    with open(run[2] / "totals.csv", newline="") as file:
        rows = {row[0]: row[1:] for row in csv.reader(file)}
    assert rows["student"] == ["assignment", "points", "of", "to be read", "not judged"]
    assert rows["model"] == ["ps1", "10", "10", "2", "0"]
    assert rows["not-json"] == ["ps1", "0", "12", "0", "0"]
    assert rows["twice"] == ["ps1", "", "0", "0", "12"]
    assert len(rows) == len(run[0]) + 1


def test_feedback_names_each_test_has_reasons_and_no_hidden_test(run):
    rows, _, out = run
    secrets = (assignment.SOURCES / "ps1/tests.py").read_text()
    for path in (out / "feedback").glob("*/ps1/ps1.html"):
        page = path.read_text()
        assert "default_rng" not in page and "yield" not in page
        shown = html.unescape(page).replace(SCRIPT, "")   # there is nothing to fetch
        assert not re.search(r"src=[^x]|href=[\"']?[^#\"']|url\(|@import", shown)
        for title in ("Even shards: values, order and devices", "Uneven shards: "):
            assert title in page and title in secrets
        assert "<math" in page and "$10i$" not in page
    page = (out / "feedback/renamed/ps1/ps1.html").read_text()
    assert "0 of 2" in page and "split_even is not defined" in page


def test_the_table_shows_reasons_in_short(run):
    lines = run[1].stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("renamed "))
    assert "ps1  6 of 10, 2 to be read" in lines[place]
    assert "split_even is not defined" in lines[place + 1]
    assert max(len(line) for line in lines if not line.startswith(("  0%", "\r", " "))) < 200


def test_marks_given_by_a_person_are_kept_and_nothing_is_judged_twice(run):
    out = run[2]
    with gradebook.open_gradebook(out) as book:
        book.find_grade("why", "ps1", "ps1", "model").manual_score = 1.5
        book.find_comment("why", "ps1", "ps1", "model").manual_comment = "well <b>put</b>"
        book.db.commit()
    again = out.parent / "again"
    shutil.copytree(out.parent / "handed-in/model", again / "model")
    shutil.copytree(out.parent / "handed-in/wrong", again / "wrong")
    put(again, "wrong", make_source())               # handed in anew
    done = run_make(again, f"OUT={out}")
    assert done.returncode == 0, done.stderr
    assert "model  ps1  11.5 of 12" in done.stdout and "wrong  ps1  10 of 10" in done.stdout
    assert "1 submissions were judged in an earlier run" in done.stdout
    page = (out / "feedback/model/ps1/ps1.html").read_text()
    assert "11.5 of 12 points" in page and "well &lt;b&gt;put" in page


def test_an_interrupt_ends_all_and_the_next_run_goes_on(tmp_path):
    folder = tmp_path / "handed-in"
    for number in range(3):
        put(folder, f"a{number}", make_source())
    for number in range(3):
        put(folder, f"b{number}", make_source(even="import time\ntime.sleep(7777)"))
    (tmp_path / "out").mkdir()
    with open(tmp_path / "said", "w+") as said:
        running = subprocess.Popen(["make", "grade", f"SUBMISSIONS={folder}"], cwd=REPOSITORY,
                                   stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        reports = tmp_path / "handed-in-marks/reports"
        deadline = time.monotonic() + 300
        while len(list(reports.glob("a*/ps1.json"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)       # as a terminal does
        running.wait(30)        # the three that sleep would be ended after 60 s each
        said.seek(0)
        text = said.read()
    assert running.returncode != 0 and "3 of 6 submissions" in text and "goes on" in text
    _, alive = psutil.wait_procs(family, 2)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    rows = read_rows(tmp_path / "handed-in-marks")
    assert points(rows, "a2") == FULL
    assert rows["b2"]["even-values"]["outcome"] == "not judged"
    for number in range(3):                          # they hand in something better
        put(folder, f"b{number}", make_source())
    done = run_make(folder)
    assert done.returncode == 0, done.stdout
    assert "3 submissions were judged in an earlier run" in done.stdout
    assert points(read_rows(tmp_path / "handed-in-marks"), "b2") == FULL


def test_an_answer_that_has_changed_is_to_be_read_again(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "in-marks"
    put(folder, "ada", make_source(why="first"))
    link = tmp_path / "link"            # the teacher's own folder may be a link
    link.symlink_to(folder)
    assert run_make(link, f"OUT={out}").returncode == 0
    with gradebook.open_gradebook(out) as book:
        book.find_grade("why", "ps1", "ps1", "ada").manual_score = 2
        book.find_grade("even-care", "ps1", "ps1", "ada").manual_score = 0.5
        book.db.commit()
    run_make(link, f"OUT={out}")
    rows = read_rows(out)["ada"]
    assert (rows["why"]["points"], rows["why"]["outcome"]) == ("2", "read")
    assert (rows["even-care"]["points"], rows["even-care"]["why not"]) == (
        "0.5", "points by your teacher.")
    os.rename(folder / "ada/ps1.ipynb", tmp_path / "away")     # for one run it isn't there,
    put(folder, "bob", make_source())
    run_make(link, f"OUT={out}")
    with open(out / "autograded/bob/ps1/ps1.ipynb", "r+") as file:
        file.truncate(1000)
    os.rename(tmp_path / "away", folder / "ada/ps1.ipynb")     # and comes back as it was
    assert run_make(link, f"OUT={out}").returncode == 0
    rows = read_rows(out)["ada"]
    assert (rows["why"]["points"], rows["even-care"]["points"]) == ("2", "0.5")
    put(folder, "ada", make_source(why="second"))
    run_make(link, f"OUT={out}")
    rows = read_rows(out)["ada"]
    assert (rows["why"]["points"], rows["why"]["outcome"]) == ("", "to be read")
    assert rows["even-care"]["points"] == "0.5"
    put(folder, "ada", make_source(why="second", even="def split_even(batch, devices): pass"))
    run_make(link, f"OUT={out}")
    assert read_rows(out)["ada"]["even-care"]["points"] == "0"
    # Another program, such as Formgrader, is writing.
    with contextlib.closing(sqlite3.connect(out / "gradebook.db")) as database:
        database.execute("BEGIN EXCLUSIVE")
        done = run_make(link, f"OUT={out}")
    assert done.returncode != 0 and "in use by another program" in done.stderr
    assert "Traceback" not in done.stderr


def test_points_by_hand_are_kept_for_the_same_words_and_dropped_with_a_sentence(tmp_path):
    gradebook.release(tmp_path, ["ps1"])
    report = judge.refuse(assignment.read_assignment("ps1"), "")
    with gradebook.open_gradebook(tmp_path) as book:
        def record(words):
            answers = {"even": "pass", "why": words}
            return gradebook.record(book, tmp_path, "ada", "ps1", {**report, "answers": answers})

        record("first\nand last")
        book.find_grade("why", "ps1", "ps1", "ada").manual_score = 1.5
        book.find_comment("why", "ps1", "ps1", "ada").manual_comment = "well put"
        page = gradebook.write_feedback(tmp_path, "ada", "ps1", {**report, "answers": {}}, {})
        shown = nbformat.read(tmp_path / "autograded/ada/ps1/ps1.ipynb", 4).cells
        place = next(i for i, cell in enumerate(shown) if "and last" in cell.source)
        key = "any 100 of the 60,000"     # what earns points, below what is read, and only there
        assert key in " ".join(shown[place + 1].source.split())
        assert key not in " ".join(page.read_text().split())
        for same in ("first \nand last\n", "first\t\nand last  \n \n"):
            assert record(same) == []
            assert gradebook.read_words(book, "ada", "ps1") == {"why": (1.5, "well put")}
        assert record("second") == [
            "why: your 1.5 of 2 were for an earlier answer, and are dropped"]
        for _ in range(2):
            assert gradebook.read_words(book, "ada", "ps1") == {
                "why": (None, "On an earlier answer: well put")}
            assert record("third") == []


@pytest.mark.parametrize("place, sentence", [
    ("in/marks", "inside the folder of submissions"), ("in", "inside the folder of submissions"),
    ("o?x", "can't use a path with"), ("file", "Not a directory")])
def test_folders_for_marks_that_cannot_be_used(tmp_path, place, sentence):
    put(tmp_path / "in", "ada", "{}")
    (tmp_path / "file").touch()
    out = tmp_path / place / "x" if place == "file" else tmp_path / place
    done = run_make(tmp_path / "in", f"OUT={out}")
    assert done.returncode != 0 and sentence in done.stderr and "Traceback" not in done.stderr


# What goes wrong with the marking itself is not the student's.

@pytest.fixture
def marking(tmp_path, monkeypatch):
    """Marks `tmp_path`/in by calling the program's own functions: (exit status, rows, output)."""
    put(tmp_path / "in", "ada", make_source())
    monkeypatch.setattr(process, "end_children", lambda: None)   # pytest's own children
    monkeypatch.setattr(signal, "signal", lambda *_: None)       # and signals

    def call(capsys):
        try:
            status = grade.mark(tmp_path / "in", tmp_path / "out")
        except SystemExit as error:
            status = error.code
        return status, read_rows(tmp_path / "out"), "".join(capsys.readouterr())
    return call


def test_a_judge_that_fails_costs_nobody_points(marking, monkeypatch, capsys):
    def ask_judge(*_):
        raise RuntimeError("MemoryError")

    monkeypatch.setattr(grade, "ask_judge", ask_judge)
    status, rows, said = marking(capsys)
    assert status == 1 and "Not judged:\n  ada  ps1: MemoryError" in said
    row = rows["ada"]["even-values"]
    assert (row["points"], row["outcome"], row["why not"]) == ("", "not judged", "MemoryError")
    assert rows["ada"]["why"]["outcome"] in ("to be read", "not judged")


def test_without_pytorch_what_needs_it_is_not_judged_and_the_rest_is(
        marking, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: None if name == "torch" else find(name, *more))
    put(tmp_path / "in", "ada", make_source("ps7"), "ps7.ipynb")
    status, rows, said = marking(capsys)
    why = "PyTorch is not installed here: make setup TORCH=1"
    assert status == 1 and f"Not judged:\n  ada  ps7: {why}\n" in said
    assert points(rows, "ada") == FULL
    row = rows["ada"]["naive-values"]
    assert (row["points"], row["outcome"], row["why not"]) == ("", "not judged", why)


@pytest.mark.parametrize("fault, sentence", [
    (OSError(28, "No space left on device"), "there is no space left on the disk"),
    (OSError(13, "Permission denied"), "there is no permission to write there"),
    (gradebook.InvalidEntry("database is locked"), "the gradebook is in use by another program"),
    (gradebook.InvalidEntry("database or disk is full"), "there is no space left on the disk")])
def test_marks_that_cannot_be_kept_give_the_true_cause(marking, monkeypatch, capsys, fault,
                                                      sentence):
    def fail(*_):
        raise fault
    monkeypatch.setattr(gradebook, "record", fail)
    status, _, _ = marking(capsys)
    assert sentence in str(status)


def test_a_test_that_fails_by_itself_is_a_fault_of_the_marking():
    def broken():
        yield None
        raise AssertionError
    read = assignment.read_assignment("ps1")
    test, solution = read.exercises[0].tests[0], types.SimpleNamespace(failed="")
    mark = judge.run_test(test, broken, read.parameters, solution, [], True)
    assert mark.outcome == judge.NOT_JUDGED and mark.points is None


def test_a_page_of_feedback_writes_points_as_people_do(tmp_path):
    """A teacher's are a database's floats."""
    (tmp_path / "release/ps1").mkdir(parents=True)
    nbformat.write(assignment.make_notebook("ps1"), tmp_path / "release/ps1/ps1.ipynb")
    report = judge.refuse(assignment.read_assignment("ps1"), "")
    for place, points in enumerate((2.0, 0.5)):
        report["marks"][place] = report["marks"][place]._replace(points=points)
    page = gradebook.write_feedback(tmp_path, "ada", "ps1", report, {}).read_text()
    assert re.findall(r">([\d.]+ of \d+)<", page)[:3] == ["2 of 2", "0.5 of 2", "0 of 2"]


def test_names_of_folders():
    for name in ("ada", "O'Brien", "Ümit Ü", "=1+1", "a$b", "名前"):
        assert harmless.find_fault_in_name(name) is None
    for name in ("a\nb", "a\x1bb", "\udc80", ".x", " a", "a ", "x" * 81, "<b>", "a*", "\u202ea"):
        assert harmless.find_fault_in_name(name)
