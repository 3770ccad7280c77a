"""Marks a folder of submissions: a table, marks.csv, and feedback that students can be given.

    python grade.py SUBMISSIONS [OUT]

SUBMISSIONS holds a folder a student, with psN.ipynb or nbgrader's psN/psN.ipynb in it. OUT, by
default SUBMISSIONS-marks, gets marks.csv, feedback/ (HTML), and nbgrader's gradebook, in which
the questions in words are marked by a person; running this again keeps those marks.

Each submission is judged by a process of its own (`judge.py`), which hands its solutions to
others (`sandbox.py`). One that can't be judged is named at the end and leaves the rest alone.
"""

import concurrent.futures
import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import nbformat
from helpers.device import cores
from nbgrader.api import Gradebook
from tqdm import tqdm

import judge
import release
import sandbox

SECONDS = 60    # for the judge itself and for each exercise, beyond the solutions' own time


class Submission(NamedTuple):
    student: str
    assignment: str
    path: Path | None     # None: not handed in


def find(folder):
    """All submissions below `folder`, in order, and those that are missing: what one student has
    handed in, every student should have."""
    if (folder / "submitted").is_dir():  # nbgrader's course folder
        folder = folder / "submitted"
    students = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = []
    for student in students:
        for name in judge.names():
            paths = [student / f"{name}.ipynb", student / name / f"{name}.ipynb"]
            found.append((student.name, name, [p for p in paths if p.exists()]))
    handed_in = {name for _, name, paths in found if paths}
    return [Submission(student, name, paths[0] if paths else None)
            for student, name, paths in found if name in handed_in]


def judged(one):
    """What `judge.submission` says of it, from a process of its own; raises RuntimeError."""
    if one.path is None:
        return {"answers": {}, "marks": [
            judge.Mark(test.grade_id, 0, test.points, "not handed in")
            for exercise in judge.read(one.assignment).exercises for test in exercise.tests]}
    command = [sys.executable, str(judge.HERE / "judge.py"), one.assignment, str(one.path)]
    limit = (1 + len(judge.read(one.assignment).exercises)) * (SECONDS + sandbox.PATIENCE)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True, env={**os.environ, "COURSE_SIMULATE": "1"})
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not judged within {limit} seconds") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or [f"exit {process.returncode}"])[-1])
    return json.loads(output)


def record(root, one, report):
    """Put a report into the gradebook, and the notebook that its feedback is made from."""
    marks = {mark.exercise: mark for mark in itertools.starmap(judge.Mark, report["marks"])}
    content = nbformat.read(root / "release" / one.assignment / f"{one.assignment}.ipynb", 4)
    with Gradebook(f"sqlite:///{root}/gradebook.db") as book:
        book.update_or_create_student(one.student)
        book.update_or_create_submission(one.assignment, one.student)
        for cell in content.cells:
            meta = cell.metadata.get("nbgrader", {})
            name = meta.get("grade_id")
            if meta.get("solution"):
                cell.source = report["answers"].get(name, "")
            if not meta.get("grade"):
                continue
            grade = book.find_grade(name, one.assignment, one.assignment, one.student)
            if name in marks:
                mark = marks[name]
                grade.auto_score, grade.needs_manual_grade = mark.points, False
                text = f"{mark.points:g} of {mark.of:g} points. {mark.why}".strip() + "\n"
                cell.outputs = [nbformat.v4.new_output("stream", text=text)]
            else:
                grade.needs_manual_grade = grade.manual_score is None
        book.db.commit()
        manual = {name: book.find_grade(name, one.assignment, one.assignment,
                                        one.student).manual_score
                  for name, _ in judge.read(one.assignment).manual}
    folder = root / "autograded" / one.student / one.assignment
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, folder / f"{one.assignment}.ipynb")
    return manual


def rows(one, report, manual):
    """One submission's lines of marks.csv."""
    for exercise, points, of, why in report["marks"]:
        yield [one.student, one.assignment, exercise, f"{points:g}", f"{of:g}", why]
    for exercise, of in judge.read(one.assignment).manual:
        score = manual[exercise]
        yield [one.student, one.assignment, exercise, "" if score is None else f"{score:g}",
               f"{of:g}", "to be read" if score is None else ""]


def grade(folder, out):
    """Judge all submissions in `folder`; the lines of marks.csv, and what could not be judged."""
    found = find(folder)
    if not found:
        sys.exit(f"{folder}: no submissions; needs STUDENT/ps1.ipynb or STUDENT/ps1/ps1.ipynb")
    warnings.filterwarnings("ignore", module="nbgrader")  # how it fills its tables
    if not sandbox.bubblewrap():
        print("bubblewrap is not here, or not permitted: a solution can read what you can read, "
              "and use the network. See notebooks/assignments/README.md.", file=sys.stderr)
    release.release(out, sorted({one.assignment for one in found}))
    lines, failed = [], []
    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        reports = [(one, pool.submit(judged, one)) for one in found]
        for one, report in tqdm(reports, unit="submission", file=sys.stdout):
            try:
                result = report.result()
                manual = record(out, one, result)
            except Exception as error:
                failed.append(f"{one.student}, {one.assignment}: {error}")
                continue
            lines += rows(one, result, manual)
    write(out / "marks.csv", lines)
    tool = release.nbgrader(out)
    for name in sorted({one.assignment for one in found}):
        outcome = tool.generate_feedback(name)
        if not outcome["success"]:
            failed.append(f"feedback on {name}: {outcome['log']}")
    return lines, failed


def write(path, lines):
    part = path.with_suffix(".part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["student", "assignment", "exercise", "points", "of", "why not"])
        table.writerows(lines)
    os.replace(part, path)


def show(lines):
    """Print points by student and assignment."""
    sums = {}
    for student, assignment, _, points, of, _ in lines:
        got = sums.setdefault((student, assignment), [0, 0, 0])
        if points == "":
            got[2] += float(of)
        else:
            got[0] += float(points)
            got[1] += float(of)
    width = max((len(student) for student, _ in sums), default=0)
    for (student, assignment), (points, of, unread) in sums.items():
        left = f", {unread:g} more to be read" if unread else ""
        print(f"{student:{width}}  {assignment}  {points:g} of {of:g}{left}")


def main(folder, out=None):
    folder = Path(folder).absolute()
    if not folder.is_dir():
        sys.exit(f"SUBMISSIONS={folder}: no such folder")
    out = Path(out).absolute() if out else folder.with_name(folder.name + "-marks")
    lines, failed = grade(folder, out)
    show(lines)
    print(f"{out}/marks.csv, {out}/feedback")
    if failed:
        sys.exit("Not judged:\n  " + "\n  ".join(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
