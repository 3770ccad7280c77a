"""Marks a folder of submissions: tables, and feedback that students can be given.

SUBMISSIONS holds a folder a student, with what `files` finds in it. OUT, by default
SUBMISSIONS-marks, gets totals.csv, marks.csv, feedback/ (HTML), reports/ (what the judge said, so
that nothing is judged twice), and nbgrader's gradebook, in which a person marks the answers in
words.

Each submission is judged by a process of its own (`judge`), which hands its solutions to others
(`process`). One that can't be judged is named at the end and leaves the rest alone.
"""

import concurrent.futures
import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import joblib
from tqdm import tqdm

from marking import files, gradebook, harmless, judge, process
from marking.assignment import SOURCES, find_missing, read_assignment

NOT_READ = "not read"   # a file, in place of the outcome of a test
COLUMNS = ["student", "assignment", "exercise", "points", "of", "why not", "outcome"]
TOTALS = ["student", "assignment", "points", "of", "to be read", "not judged"]


def make_key(text, name):
    """Tells a judgement from every other: by the submission, and by all that it is judged with."""
    state = hashlib.sha256(text.encode("utf-8", "replace"))
    here = Path(__file__).parent
    files = [*here.glob("*.py"), *(SOURCES / name).glob("*.py"),
             *(process.REPOSITORY / "helpers" / helper for helper in judge.HANDED_OUT)]
    for path in sorted(files):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()


def ask_judge(one, text, hidden, scratch):
    """The report of a judge's process on one submission. Raises RuntimeError where there is none.

    hidden: folders that its solutions must not see. scratch: for the judge's own files.
    """
    assignment = read_assignment(one.assignment)
    job = {"assignment": assignment, "text": text, "hidden": [str(path) for path in hidden]}
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(process.REPOSITORY)])
    with subprocess.Popen(
            [sys.executable, "-m", "marking.judge"], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": scratch}) as running:
        try:
            printed, errors = running.communicate(
                json.dumps(job).encode(),
                (1 + len(assignment.exercises)) * (judge.TIME + process.START))
        except subprocess.TimeoutExpired:
            raise RuntimeError("the judge was not done in time") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    if running.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise RuntimeError((lines or [f"exit {running.returncode}"])[-1])
    return read_marks(json.loads(printed))


class Marking:
    """One run over a folder: what has been judged, and where it goes."""

    def __init__(self, folder, out):
        self.folder, self.submissions, self.unusable, self.unread, self.renamed = (
            files.find_submissions(folder))
        self.out, self.rows, self.again, self.dropped = out, {}, 0, []
        self.notes = {one: [f"Not read: {files.show(file.path)}: {file.why}"
                            for file in self.unread if file.student == one.student
                            and file.assignment in (None, one.assignment)]
                      for one in self.submissions}   # what the page says above the marks

    def run(self):
        """Judge all submissions, as many at a time as there are cores, and record each.

        Whatever ends this, marks.csv says what is done, and no process is left.
        """
        hidden = [process.REPOSITORY, self.out, self.folder]
        scratch = tempfile.mkdtemp(prefix="marking-")
        pool = concurrent.futures.ThreadPoolExecutor(joblib.cpu_count())
        try:
            with gradebook.open_gradebook(self.out) as book, tqdm(
                    total=len(self.submissions), unit="submission", file=sys.stdout) as progress:
                judging = {}
                for one in self.submissions:
                    report, text = self.look_up(one)
                    if report is None:
                        judging[pool.submit(ask_judge, one, text, hidden, scratch)] = one, text
                    else:
                        self.finish(book, one, report)
                        progress.update()
                for future in concurrent.futures.as_completed(judging):
                    one, text = judging[future]
                    progress.set_postfix_str(
                        f"{harmless.for_terminal(one.student)}, {one.assignment}")
                    self.finish(book, one, self.keep(one, text, future))
                    progress.update()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)   # a second Ctrl-C must not cost the table
            pool.shutdown(wait=False, cancel_futures=True)
            self.write_tables()
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
            why = files.explain_doubt(one) if one.doubtful else "not handed in"
            return judge.refuse(assignment, why), None
        if missing := find_missing(assignment):
            return give_up(one, missing), None
        try:
            text, notes = files.read_submission(self.folder, one)
        except files.Refused as error:
            return judge.refuse(assignment, str(error)), None
        except OSError as error:
            return give_up(one, f"the file can't be read: {error.strerror}"), None
        self.notes[one] = notes + self.notes[one]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            report = json.loads(self.find_report(one).read_text())
            if report.pop("key") == make_key(text, one.assignment):
                self.again += 1
                return read_marks(report), None
        return None, text

    def keep(self, one, text, future):
        """A judge's report, kept for the next run."""
        try:
            report = future.result()
        except RuntimeError as error:
            return give_up(one, str(error))
        if all(mark.outcome != judge.NOT_JUDGED for mark in report["marks"]):
            path = self.find_report(one)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_safely(path, json.dumps({"key": make_key(text, one.assignment), **report}))
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
        words = {}
        report = {**report, "notes": self.notes[one] + report["notes"]}
        if any(mark.outcome != judge.NOT_JUDGED for mark in report["marks"]):
            dropped = gradebook.record(book, self.out, one.student, one.assignment, report)
            self.dropped += [f"{one.student}  {one.assignment}  {line}" for line in dropped]
            report = {**report, "marks": gradebook.read_changes(
                book, one.student, one.assignment, report["marks"])}
            words = gradebook.read_words(book, one.student, one.assignment)
            gradebook.write_feedback(self.out, one.student, one.assignment, report, words)
        self.rows[one] = make_rows(one, report, words)

    def write_tables(self):
        """marks.csv and totals.csv: what is done, and that the rest is not."""
        rows, totals = [], []
        for one in self.submissions:
            its = self.rows.get(one) or make_rows(
                one, give_up(one, "the marking was stopped before"), {})
            rows += its
            points, *more = add_up(its)
            totals.append([one.student, one.assignment, f"{points:g}" if more[0] else "",
                           *(f"{number:g}" for number in more)])
        rows += [[file.student, file.assignment or "", "", "", "",
                  f"{files.show(file.path)}: {file.why}", NOT_READ] for file in self.unread]
        write_table(self.out / "marks.csv", COLUMNS, rows)
        write_table(self.out / "totals.csv", TOTALS, totals)

    def show_dropped(self):
        """Print which of a person's points no longer count, however the run ended."""
        if self.dropped:
            print("No longer counted:", *map(harmless.for_terminal, self.dropped), sep="\n  ")

    def show(self):
        """Print points by student and assignment, with the reasons in short; then what was not
        read, and what was not judged. Returns whether all was."""
        width = max(len(harmless.for_terminal(one.student)) for one in self.submissions)
        missed = []
        for one in self.submissions:
            who = f"{harmless.for_terminal(one.student):{width}}  {one.assignment}"
            points, of, *left = add_up(self.rows[one])
            print(f"{who}  {points:g} of {of:g}" + "".join(
                f", {more:g} {outcome}" for outcome, more in zip(TOTALS[-2:], left) if more))
            reasons = {}
            for row in self.rows[one]:
                if row[5] and row[6] != gradebook.TO_BE_READ:
                    reasons.setdefault(harmless.for_terminal(row[5]), []).append(row[2])
                    missed += [f"{who}: {row[5]}"] * (row[6] == judge.NOT_JUDGED)
            for why, tests in reasons.items():
                name = tests[0] if len(tests) == 1 else f"{len(tests)} tests"
                print(f"{'':{width}}       {name}: {shorten(why)}")
        if self.unread:
            print("Not read:", *(harmless.for_terminal(f"{'/'.join(file.path)}: {file.why}")
                                 for file in self.unread), sep="\n  ")
        if missed:
            print("Not judged:", *map(harmless.for_terminal, dict.fromkeys(missed)), sep="\n  ")
        return not missed


def give_up(one, why):
    """The report on a submission that could not be judged."""
    return judge.refuse(read_assignment(one.assignment), why, judge.NOT_JUDGED)


def read_marks(report):
    return {**report, "marks": [judge.Mark(*mark) for mark in report["marks"]]}


def make_rows(one, report, words):
    """One submission's lines of marks.csv. words: from `gradebook.read_words`."""
    rows = [[one.student, one.assignment, mark.exercise,
             "" if mark.points is None else f"{mark.points:g}", f"{mark.of:g}", mark.why,
             mark.outcome] for mark in report["marks"]]
    for word in gradebook.judge_words(one.assignment, report, words):
        rows.append([one.student, one.assignment, word.key,
                     "" if word.points is None else f"{word.points:g}", f"{word.of:g}", word.why,
                     word.outcome])
    return rows


def add_up(rows):
    """(points, of how many, points to be read, points not judged) of one submission's lines."""
    counted = [row for row in rows if row[3]]
    points, of = (sum(float(row[place]) for row in counted) for place in (3, 4))
    return points, of, *(sum(float(row[4]) for row in rows if row[6] == outcome)
                         for outcome in (gradebook.TO_BE_READ, judge.NOT_JUDGED))


def write_table(path, columns, rows):
    stream = io.StringIO(newline="")
    table = csv.writer(stream)
    table.writerow(columns)
    table.writerows([harmless.for_table(cell) for cell in row] for row in rows)
    write_safely(path, stream.getvalue())


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
        lost = [f", and {harmless.for_terminal(student)} can't be used: {why}"
                for student, why in marking.unusable.items()]
        lost += [f", and {harmless.for_terminal(file.path[0])} lies in no student's folder"
                 for file in marking.unread if not file.student]
        raise SystemExit(f"{marking.folder}: no submissions; needs STUDENT/ps1.ipynb or "
                         f"STUDENT/ps1/ps1.ipynb{''.join(lost[:1])}")
    if out.resolve().is_relative_to(marking.folder):
        raise SystemExit(f"OUT={out}: inside the folder of submissions; choose another one")
    if set(str(out)) & set("?%#"):
        raise SystemExit(f"OUT={out}: nbgrader can't use a path with ?, % or #; choose another one")
    warnings.filterwarnings("ignore", module="nbgrader")  # how it fills its tables
    sys.stdout.reconfigure(errors="backslashreplace")
    for name, student in marking.renamed.items():
        late = " (late)" if "_LATE_" in name else ""
        print(harmless.for_terminal(f"From {student}{late}: {name}"), file=sys.stderr)
    for student, why in marking.unusable.items():
        print(f"The folder '{harmless.for_terminal(student)}' can't be used: {why}",
              file=sys.stderr)
    for file in marking.unread:
        print(harmless.for_terminal(f"Not read: {'/'.join(file.path)}: {file.why}"),
              file=sys.stderr)
    if not process.find_bubblewrap():
        print("bubblewrap is not here, or not permitted: a solution can read what you can read, "
              "and use the network. See notebooks/assignments/promises.md.", file=sys.stderr)
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
    finally:
        marking.show_dropped()
    complete = marking.show()
    if marking.again:
        print(f"{marking.again} submissions were judged in an earlier run and have not changed.")
    print(f"In {out}: totals.csv, marks.csv, feedback")
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
    return f"{out}: {why}, then give the same command again ({harmless.shorten(text)})"
