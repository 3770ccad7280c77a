"""Marks a folder of submissions: a table, marks.csv, and feedback that students can be given.

SUBMISSIONS holds a folder a student, with psN.ipynb or nbgrader's psN/psN.ipynb in it. OUT, by
default SUBMISSIONS-marks, gets marks.csv, feedback/ (HTML), reports/ (what the judge said, so that
nothing is judged twice), and nbgrader's gradebook, in which a person marks the answers in words.

Each submission is judged by a process of its own (`judge`), which hands its solutions to others
(`process`). One that can't be judged is named at the end and leaves the rest alone.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import joblib
from tqdm import tqdm

from marking import gradebook, harmless, judge, process
from marking.assignment import SOURCES, find_missing, list_names, read_assignment

LARGEST = 20 * 2**20   # bytes of a submission
TO_BE_READ = "to be read"
COLUMNS = ["student", "assignment", "exercise", "points", "of", "why not", "outcome"]


class Submission(NamedTuple):
    student: str
    assignment: str
    path: tuple | None     # names of folders and file; None: missing


class Refused(Exception):
    """A file that isn't read, and why: its author's fault."""


def find_submissions(folder):
    """(all submissions below `folder`, those missing included; {student: why it can't be used}).

    What one student has handed in, every student should have.
    """
    if (folder / "submitted").is_dir():  # nbgrader's course folder
        folder = folder / "submitted"
    folder = folder.resolve()            # it may be a link: it is the teacher's
    found, unusable = [], {}
    for student in sorted(os.listdir(folder)):
        kind = os.lstat(folder / student).st_mode
        if student.startswith(".") or not (stat.S_ISDIR(kind) or stat.S_ISLNK(kind)):
            continue
        why = "it is a link" if stat.S_ISLNK(kind) else harmless.find_fault_in_name(student)
        if not why and not os.access(folder / student, os.R_OK | os.X_OK):
            why = "there is no permission to read it"
        if why:
            unusable[student] = why
        for name in list_names():
            paths = [(student, f"{name}.ipynb"), (student, name, f"{name}.ipynb")]
            there = [path for path in paths if is_there(folder.joinpath(*path))]
            if len(there) > 1:
                unusable[student] = f"it has two of {name}, {name}.ipynb and {name}/{name}.ipynb"
            found.append(Submission(student, name, there[0] if there else None))
    handed_in = {one.assignment for one in found if one.path}
    return folder, [one for one in found if one.assignment in handed_in], unusable


def is_there(path):
    """Whether there is something, be it a link to nothing or in a folder that can't be read."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def find_unread(folder, submissions):
    """Notebooks in the students' folders that have no assignment's name, and so aren't read."""
    read = {folder.joinpath(*one.path) for one in submissions if one.path}
    found = {path for student in {one.student for one in submissions}
             for pattern in ("*.ipynb", "*/*.ipynb", "*/*/*.ipynb")
             for path in (folder / student).glob(pattern)}
    return sorted(path for path in found - read if ".ipynb_checkpoints" not in path.parts)


def read_submission(folder, path):
    """The text of a submission: of a regular file, reached through no link, and not too large.

    Raises Refused, and OSError where the file is there and this machine can't read it.
    """
    with contextlib.ExitStack() as opened:
        def step(name, flags, place):
            end = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
            opened.callback(os.close, end)
            return end
        try:
            place = step(folder, os.O_RDONLY | os.O_DIRECTORY, None)
            for name in path:
                if stat.S_ISLNK(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                    raise Refused(f"{name} is a link: hand in the file itself")
                place = step(name, os.O_RDONLY, place)
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise Refused("not a regular file")
            content = b""
            while piece := os.read(place, 2**20):
                content += piece
                if len(content) > LARGEST:
                    raise Refused(f"the file is larger than {LARGEST // 2**20} MiB")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise Refused(f"not a regular file: {error.strerror}") from error
            raise
    return content.decode("utf-8", "replace")


def make_key(text, name):
    """Tells a judgement from every other: by the submission, and by all that it is judged with."""
    state = hashlib.sha256(text.encode("utf-8", "replace"))
    here = Path(__file__).parent
    files = [*here.glob("*.py"), *(SOURCES / name).glob("*.py"),
             *(process.REPOSITORY / "helpers" / helper for helper in judge.HANDED_OUT)]
    for path in sorted(files):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()


class Judging:
    """A judge's process at work on one submission."""

    def __init__(self, one, text, hidden, scratch):
        assignment = read_assignment(one.assignment)
        self.one, self.key = one, make_key(text, one.assignment)
        self.deadline = time.monotonic() + (1 + len(assignment.exercises)) * (
            judge.TIME + process.START)
        self.files = [tempfile.TemporaryFile() for _ in range(3)]
        job = {"assignment": assignment, "text": text, "hidden": [str(path) for path in hidden]}
        self.files[0].write(json.dumps(job).encode())
        self.files[0].seek(0)
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(process.REPOSITORY)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "marking.judge"], start_new_session=True, stdin=self.files[0],
            stdout=self.files[1], stderr=self.files[2],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": scratch})

    def read_report(self):
        """The report, None while there is none. Raises RuntimeError where there will be none."""
        if self.process.poll() is None:
            if time.monotonic() < self.deadline:
                return None
            self.kill()
            raise RuntimeError("the judge was not done in time")
        for file in self.files:
            file.seek(0)
        if self.process.returncode:
            errors = self.files[2].read().decode(errors="replace").strip().splitlines()
            raise RuntimeError((errors or [f"exit {self.process.returncode}"])[-1])
        report = json.loads(self.files[1].read())
        return read_marks(report)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Marking:
    """One run over a folder: what has been judged, and where it goes."""

    def __init__(self, folder, out):
        self.folder, self.submissions, self.unusable = find_submissions(folder)
        self.out, self.rows, self.again = out, {}, 0

    def run(self):
        """Judge all submissions, as many at a time as there are cores, and record each.

        Whatever ends this, marks.csv says what is done, and no process is left.
        """
        hidden, running = [process.REPOSITORY, self.out, self.folder], []
        scratch = tempfile.mkdtemp(prefix="marking-")
        try:
            with gradebook.open_gradebook(self.out) as book, tqdm(
                    total=len(self.submissions), unit="submission", file=sys.stdout) as progress:
                waiting = iter(self.submissions)
                while True:
                    while len(running) < joblib.cpu_count() and (one := next(waiting, None)):
                        progress.set_postfix_str(
                            f"{harmless.for_terminal(one.student)}, {one.assignment}")
                        report, text = self.look_up(one)
                        if report is None:
                            running.append(Judging(one, text, hidden, scratch))
                        else:
                            self.finish(book, one, report)
                            progress.update()
                    if not running:
                        break
                    time.sleep(0.02)
                    for judging in list(running):
                        if report := self.collect(judging):
                            running.remove(judging)
                            self.finish(book, judging.one, report)
                            progress.update()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)   # a second Ctrl-C must not cost the table
            self.write_table()
            process.end_children()
            process.remove_folder(scratch)

    def look_up(self, one):
        """(report, None) of a submission that needs no judge, or that was judged before; else
        (None, its text)."""
        assignment = read_assignment(one.assignment)
        if one.student in self.unusable:
            why = f"the folder can't be used: {self.unusable[one.student]}"
            return give_up(one, why), None
        if one.path is None:
            return {"answers": {}, "marks": judge.refuse(assignment, "not handed in")}, None
        if missing := find_missing(assignment):
            return give_up(one, missing), None
        try:
            text = read_submission(self.folder, one.path)
        except Refused as error:
            return {"answers": {}, "marks": judge.refuse(assignment, str(error))}, None
        except OSError as error:
            return give_up(one, f"the file can't be read: {error.strerror}"), None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            report = json.loads(self.find_report(one).read_text())
            if report.pop("key") == make_key(text, one.assignment):
                self.again += 1
                return read_marks(report), None
        return None, text

    def collect(self, judging):
        """A judge's report, kept for the next run; None while it is at work."""
        try:
            report = judging.read_report()
        except RuntimeError as error:
            return give_up(judging.one, str(error))
        if report and all(mark.outcome != judge.NOT_JUDGED for mark in report["marks"]):
            path = self.find_report(judging.one)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_safely(path, json.dumps({"key": judging.key, **report}))
        return report

    def find_report(self, one):
        return self.out / "reports" / one.student / f"{one.assignment}.json"

    def finish(self, book, one, report):
        """Put a report where it belongs. What goes wrong with one submission ends no other."""
        try:
            self.file(book, one, report)
        except (OSError, gradebook.Unusable, *gradebook.FAULTS):
            raise
        except Exception as error:
            self.rows[one] = make_rows(one, give_up(one, judge.describe_fault(error)), {})

    def file(self, book, one, report):
        """Put a report where it belongs: gradebook, feedback, table. What could not be judged
        changes nothing in the first two."""
        words = {key: (None, "") for key, _, _ in read_assignment(one.assignment).words}
        if any(mark.outcome != judge.NOT_JUDGED for mark in report["marks"]):
            gradebook.record(book, self.out, one.student, one.assignment, report)
            report = {**report, "marks": gradebook.read_changes(
                book, one.student, one.assignment, report["marks"])}
            words = gradebook.read_words(book, one.student, one.assignment)
            gradebook.write_feedback(self.out, one.student, one.assignment, report, words)
        self.rows[one] = make_rows(one, report, words)

    def write_table(self):
        """marks.csv: what is done, and that the rest is not."""
        rows = [row for one in self.submissions
                for row in self.rows.get(one) or make_rows(
                    one, give_up(one, "the marking was stopped before"), {})]
        stream = io.StringIO(newline="")
        table = csv.writer(stream)
        table.writerow(COLUMNS)
        table.writerows([harmless.for_table(cell) for cell in row] for row in rows)
        write_safely(self.out / "marks.csv", stream.getvalue())

    def show(self):
        """Print points by student and assignment, with the reasons in short; then what was not
        judged. Returns whether all was."""
        width = max(len(harmless.for_terminal(one.student)) for one in self.submissions)
        missed = []
        for one in self.submissions:
            who = f"{harmless.for_terminal(one.student):{width}}  {one.assignment}"
            counted = [row for row in self.rows[one] if row[3]]
            points, of = (sum(float(row[place]) for row in counted) for place in (3, 4))
            left = {outcome: sum(float(row[4]) for row in self.rows[one] if row[6] == outcome)
                    for outcome in (TO_BE_READ, judge.NOT_JUDGED)}
            print(f"{who}  {points:g} of {of:g}" + "".join(
                f", {more:g} {outcome}" for outcome, more in left.items() if more))
            reasons = {}
            for row in self.rows[one]:
                if row[5] and row[6] != TO_BE_READ:
                    reasons.setdefault(harmless.for_terminal(row[5]), []).append(row[2])
                    missed += [f"{who}: {row[5]}"] * (row[6] == judge.NOT_JUDGED)
            for why, tests in reasons.items():
                name = tests[0] if len(tests) == 1 else f"{len(tests)} tests"
                print(f"{'':{width}}       {name}: {shorten(why)}")
        if missed:
            print("Not judged:", *map(harmless.for_terminal, dict.fromkeys(missed)), sep="\n  ")
        return not missed


def give_up(one, why):
    """The report on a submission that could not be judged."""
    return {"answers": {}, "marks": judge.refuse(
        read_assignment(one.assignment), why, judge.NOT_JUDGED)}


def read_marks(report):
    return {**report, "marks": [judge.Mark(*mark) for mark in report["marks"]]}


def make_rows(one, report, words):
    """One submission's lines of marks.csv. words: from `gradebook.read_words`."""
    rows = [[one.student, one.assignment, mark.exercise,
             "" if mark.points is None else f"{mark.points:g}", f"{mark.of:g}", mark.why,
             mark.outcome] for mark in report["marks"]]
    for key, of, _ in read_assignment(one.assignment).words:
        score = words.get(key, (None, ""))[0]
        why, outcome = ("", "read") if score is not None else (TO_BE_READ, TO_BE_READ)
        if score is None and not report["answers"].get(key, "").strip():
            score, why, outcome = 0, "no answer", judge.JUDGED
            if all(mark.outcome == judge.NOT_JUDGED for mark in report["marks"]):
                score, why, outcome = None, report["marks"][0].why, judge.NOT_JUDGED
        rows.append([one.student, one.assignment, key, "" if score is None else f"{score:g}",
                     f"{of:g}", why, outcome])
    return rows


def write_safely(path, text):
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="")
    os.replace(part, path)


def shorten(text, most=100):
    return text if len(text) <= most else text[:most - 1] + "…"


def mark(folder, out):
    """Mark `folder` into `out`. Returns the exit status: 0, or 1 where something was not judged.

    Raises KeyboardInterrupt, and SystemExit with a sentence where it can't start or go on.
    """
    try:
        if not folder.is_dir():
            raise SystemExit(f"SUBMISSIONS={folder}: no such folder")
        marking = Marking(folder, out)
    except OSError as error:
        raise SystemExit(f"SUBMISSIONS={folder}: it can't be read: {error.strerror}") from None
    if not marking.submissions:
        raise SystemExit(f"{marking.folder}: no submissions; needs STUDENT/ps1.ipynb or "
                         "STUDENT/ps1/ps1.ipynb")
    if out.resolve().is_relative_to(marking.folder):
        raise SystemExit(f"OUT={out}: inside the folder of submissions; choose another one")
    if set(str(out)) & set("?%#"):
        raise SystemExit(f"OUT={out}: nbgrader can't use a path with ?, % or #; choose another one")
    warnings.filterwarnings("ignore", module="nbgrader")  # how it fills its tables
    sys.stdout.reconfigure(errors="backslashreplace")
    for student, why in marking.unusable.items():
        print(f"The folder '{harmless.for_terminal(student)}' can't be used: {why}",
              file=sys.stderr)
    for path in find_unread(marking.folder, marking.submissions):
        print(f"Not read: {harmless.for_terminal(path.relative_to(marking.folder))}, which is not "
              "STUDENT/psN.ipynb or STUDENT/psN/psN.ipynb", file=sys.stderr)
    if not process.find_bubblewrap():
        print("bubblewrap is not here, or not permitted: a solution can read what you can read, "
              "and use the network. See notebooks/assignments/README.md.", file=sys.stderr)
    process.adopt_orphans()
    try:
        gradebook.try_gradebook(out)
        gradebook.release(out, sorted({one.assignment for one in marking.submissions}))
        marking.run()
    except KeyboardInterrupt:
        if marking.rows:
            print(f"\nStopped: {len(marking.rows)} of {len(marking.submissions)} submissions are "
                  f"in {out}/marks.csv. The same command goes on from there.")
        raise
    except FileExistsError as error:
        raise SystemExit(str(error)) from None
    except (OSError, gradebook.Unusable) as error:
        raise SystemExit(explain(error, out)) from None
    complete = marking.show()
    if marking.again:
        print(f"{marking.again} submissions were judged in an earlier run and have not changed.")
    print(f"{out}/marks.csv, {out}/feedback")
    return 0 if complete else 1


def explain(error, out):
    """A sentence on why marks can't be kept, then what the system said."""
    text, code = str(error), getattr(error, "errno", None)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(out if out.exists() else out.parent).free < 2**20:
            code = errno.ENOSPC
    if "locked" in text:
        why = "the gradebook is in use by another program, Formgrader perhaps: close it"
    elif "is full" in text or code == errno.ENOSPC:
        why = "there is no space left on the disk: make some"
    elif "readonly" in text or code in (errno.EACCES, errno.EROFS, errno.EPERM):
        why = "there is no permission to write there: choose another folder (OUT=folder)"
    else:
        why = "the marks can't be kept there"
    return f"{out}: {why}, then give the same command again ({judge.shorten(text)})"
