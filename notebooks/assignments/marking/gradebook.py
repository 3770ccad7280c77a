"""nbgrader's side of the marking: what students get, its gradebook, and the pages of feedback.

nbgrader takes solutions out of the notebooks, keeps the points, and has a page, Formgrader, on
which a teacher reads answers in words. The feedback is our own: one page, with nothing to fetch.
"""

import contextlib
import functools
import logging
import os
import shutil
import sqlite3
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import jinja2
import nbformat
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markupsafe import Markup
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbgrader.api import Gradebook, InvalidEntry
from nbgrader.apps import NbGraderAPI
from sqlalchemy.exc import SQLAlchemyError
from traitlets.config import Config

from marking import harmless, judge
from marking.assignment import PLACEHOLDER, STUB, make_notebook, read_assignment
from marking.process import REPOSITORY

OURS = "# Written by the course; JupyterLab's Formgrader reads it when started from this folder."
COURSE = "many-devices"
CONFIG = OURS + """
c = get_config()
c.CourseDirectory.root = {root!r}
c.CourseDirectory.course_id = {course!r}
c.Exchange.root = {root!r} + "/exchange"   # not used; without one Formgrader warns
"""


FAULTS = SQLAlchemyError, InvalidEntry
TO_BE_READ = "to be read"
EARLIER = "On an earlier answer: "   # so begins a comment on one that another has replaced


class Words(NamedTuple):
    """What an answer in words has earned. points: None as long as nobody has read it."""

    key: str
    title: str
    points: float | None
    of: float
    why: str
    outcome: str
    comment: str         # a person's


class Unusable(Exception):
    """nbgrader can't keep what it is given; the text is what it said."""


def start_nbgrader(root):
    """nbgrader at work in the folder `root`, saying only what goes wrong."""
    # It starts alembic, which makes the gradebook, by name.
    os.environ["PATH"] = os.pathsep.join([f"{sys.prefix}/bin", os.environ.get("PATH", "")])
    config = Config()
    config.CourseDirectory.root = str(root)
    config.CourseDirectory.course_id = COURSE
    config.CourseDirectory.db_url = f"sqlite:///{root}/gradebook.db"
    config.Exchange.root = f"{root}/exchange"
    config.ClearSolutions.code_stub = {"python": STUB}
    config.ClearSolutions.text_stub = PLACEHOLDER
    config.NbGraderAPI.log_level = logging.ERROR
    config.Application.log_level = logging.ERROR
    return NbGraderAPI(config=config)


def release(root, names):
    """Write the student versions of the assignments `names` to `root`/release.

    Raises FileExistsError where `root` has assignments that this didn't put there: they are kept;
    Unusable.
    """
    config = root / "nbgrader_config.py"
    ours = config.exists() and config.read_text().startswith(OURS)
    if (root / "source").exists() and not ours:
        raise FileExistsError(f"{root}: source/ in it is not from here, and would be overwritten; "
                              "choose another folder (OUT=folder)")
    (root / "exchange").mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG.format(root=str(root), course=COURSE))
    tool = start_nbgrader(root)
    for name in names:
        source = root / "source" / name
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        if any(exercise.ranks > 1 for exercise in read_assignment(name).exercises):
            shutil.copy(REPOSITORY / "notebooks/ranks.py", source)
        else:
            (source / "helpers").mkdir()
            for helper in judge.HANDED_OUT:
                shutil.copy(REPOSITORY / "helpers" / helper, source / "helpers")
        nbformat.write(make_notebook(name), source / f"{name}.ipynb")
        outcome = tool.generate_assignment(name)
        if not outcome["success"]:
            raise Unusable(f"nbgrader could not make {name}: {outcome['log'].strip()}")


def pack(root, name):
    """A zip of one assignment as released, in a folder of its name."""
    with zipfile.ZipFile(root / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted((root / "release" / name).rglob("*")):
            packed.write(path, Path(name) / path.relative_to(root / "release" / name))
    return root / f"{name}.zip"


@contextlib.contextmanager
def open_gradebook(root):
    """nbgrader's gradebook. Raises Unusable where it can't be read or written."""
    try:
        with Gradebook(f"sqlite:///{root}/gradebook.db", COURSE) as book:
            yield book
    except FAULTS as error:
        raise Unusable(str(error)) from error


def try_gradebook(root):
    """Raises Unusable where there is a gradebook that can't be written now."""
    path = root / "gradebook.db"
    if path.exists():
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
                database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise Unusable(str(error)) from error


def record(book, root, student, name, report):
    """Put a report into the gradebook, and write the notebook that Formgrader shows.

    A person's points are dropped where another answer has taken the place of the one they were
    for, and a comment on it says so from then on; words are the same whatever blanks end their
    lines. Where nothing was handed in now, that notebook stays as it was. Returns a sentence for
    each that was dropped.
    """
    marks = {mark.exercise: mark for mark in report["marks"]}
    words = {key for key, *_ in read_assignment(name).words}
    path = root / "autograded" / student / name / f"{name}.ipynb"
    before = read_cells(path)
    changed, dropped = set(), []
    for key, answer in report["answers"].items():
        old, new = before.get(key, answer), harmless.for_database(answer)
        if key in words:
            old, new = strip_lines(old), strip_lines(new)
        if answer and old not in (answer, new):
            changed.add(key)
    for exercise in read_assignment(name).exercises:
        changed |= {t.grade_id for t in exercise.tests if exercise.name in changed}
    content = nbformat.read(root / "release" / name / f"{name}.ipynb", 4)
    shown = []
    book.update_or_create_student(student)
    book.update_or_create_submission(name, student)
    for cell in content.cells:
        meta = cell.metadata.get("nbgrader", {})
        key = meta.get("grade_id")
        if meta.get("solution"):
            answer = report["answers"].get(key, "")
            cell.metadata["answer"] = harmless.for_database(answer)
            comment = book.find_comment(key, name, name, student)
            if key in changed and not (comment.comment or EARLIER).startswith(EARLIER):
                comment.manual_comment = EARLIER + comment.comment
            cell.source = (harmless.for_markdown if cell.cell_type == "markdown"
                           else harmless.for_database)(answer)
        elif cell.cell_type == "markdown":
            cell.source = render_text(cell.source)
        shown.append(cell)
        if key in words:
            shown.append(nbformat.v4.new_markdown_cell(
                f"<strong>What earns points</strong>{render_text(read_keys(name)[key])}"))
        if not meta.get("grade"):
            continue
        grade = book.find_grade(key, name, name, student)
        if key in changed:
            if (score := read_score(grade)) is not None:
                dropped.append(f"{key}: your {score:g} of {grade.max_score:g} were for an earlier "
                               "answer, and are dropped")
            grade.manual_score = grade.extra_credit = None
        if key in marks:
            mark = marks[key]
            if mark.outcome != judge.NOT_JUDGED:
                grade.auto_score, grade.needs_manual_grade = mark.points, False
            cell.outputs = [nbformat.v4.new_output("stream", text=describe_mark(mark) + "\n")]
        else:
            grade.needs_manual_grade = grade.manual_score is None and bool(
                report["answers"].get(key, "").strip())
    book.db.commit()
    if report["answers"] or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")   # whole or not at all
        content.cells = shown
        nbformat.write(content, part)
        part.replace(path)
    return dropped


def strip_lines(text):
    """Text without blanks at the ends of its lines, and without empty lines at its own."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


@functools.cache
def read_keys(name):
    """{grade_id: what earns points} of an assignment's questions in words."""
    words = {key for key, *_ in read_assignment(name).words}
    return {key: cell.source for cell in make_notebook(name).cells
            if (key := cell.metadata.get("nbgrader", {}).get("grade_id")) in words}


def read_cells(path):
    """{grade_id: answer} of a notebook that `record` wrote; nothing where there is none."""
    try:
        return {cell.metadata["nbgrader"]["grade_id"]: cell.metadata["answer"]
                for cell in nbformat.read(path, 4).cells if "answer" in cell.metadata}
    except Exception:  # none, or one that was cut off
        return {}


def read_score(grade):
    """A person's points, those for more than was asked included; None where there are none."""
    return None if grade.manual_score is None else grade.manual_score + (grade.extra_credit or 0)


def read_changes(book, student, name, marks):
    """`marks`, with the points that a person gave in place of the judge's."""
    changed = []
    for mark in marks:
        score = read_score(book.find_grade(mark.exercise, name, name, student))
        if score is not None:
            why = f"points by your teacher. {mark.why}".strip()
            mark = mark._replace(points=score, why=why, outcome=judge.JUDGED)
        changed.append(mark)
    return changed


def read_words(book, student, name):
    """{grade_id: (points or None, comment)} of the answers that a person reads."""
    found = {}
    for key, _, _ in read_assignment(name).words:
        grade = book.find_grade(key, name, name, student)
        comment = book.find_comment(key, name, name, student)
        found[key] = read_score(grade), comment.comment or ""
    return found


def judge_words(name, report, words):
    """`Words` for each question of an assignment: the same on the page and in the table.

    words: from `read_words`; empty where nothing is known of them.
    """
    judged = []
    for key, of, title in read_assignment(name).words:
        points, comment = words.get(key, (None, ""))
        why, outcome = ("", "read") if points is not None else (TO_BE_READ, TO_BE_READ)
        if points is None and not report["answers"].get(key, "").strip():
            points, why, outcome = 0, "no answer", judge.JUDGED
            if not report["answers"]:   # nothing was read
                why = report["marks"][0].why
            if all(mark.outcome == judge.NOT_JUDGED for mark in report["marks"]):
                points, why, outcome = None, report["marks"][0].why, judge.NOT_JUDGED
        judged.append(Words(key, title, points, of, why, outcome, comment))
    return judged


def describe_mark(mark):
    """What a mark says, in a line."""
    if mark.outcome == judge.NOT_JUDGED:
        return "not judged: the marking failed, which is not the student's fault"
    why = f": {mark.why}" if mark.why else ""
    return harmless.for_terminal(f"{mark.points:g} of {mark.of:g}{why}")


def _show_formula(text, options):
    return convert(text, display="block" if options["display_mode"] else "inline")


_MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, renderer=_show_formula)
_PAGES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent),
                            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def render_text(markdown):
    """HTML of a text of ours, with formulas as MathML. Never for what a student wrote."""
    return _MARKDOWN.render(markdown)


def write_feedback(root, student, name, report, words):
    """Write feedback/STUDENT/psN/psN.html. words: from `read_words`."""
    read = read_assignment(name)
    marks = {mark.exercise: mark for mark in report["marks"]}
    content = nbformat.read(root / "release" / name / f"{name}.ipynb", 4)
    cells = []
    for cell in content.cells:
        meta = cell.metadata.get("nbgrader", {})
        key = meta.get("grade_id")
        answer = harmless.for_database(report["answers"].get(key, "")) if meta.get(
            "solution") else None
        cells.append({
            "key": key, "code": cell.cell_type == "code", "answer": answer,
            "test": bool(meta.get("grade")) and answer is None,
            "text": cell.source if cell.cell_type == "code" else Markup(render_text(cell.source))})
    rows = [(e.title, t.grade_id, t.title, marks[t.grade_id], describe_mark(marks[t.grade_id]))
            for e in read.exercises for t in e.tests]
    counted = [m for m in marks.values() if m.outcome != judge.NOT_JUDGED]
    answers = judge_words(name, report, words)
    counted += [word for word in answers if word.points is not None]
    page = _PAGES.get_template("feedback.html").render(
        name=name, student=student, rows=rows, cells=cells, marks=marks,
        titles={key: title for _, key, title, *_ in rows}, describe=describe_mark,
        not_judged=any(m.outcome == judge.NOT_JUDGED for m in marks.values()), words=answers,
        notes=[harmless.for_database(note) for note in report["notes"]],
        points=sum(m.points for m in counted), of=sum(m.of for m in counted),
        unread=sum(word.of for word in answers if word.outcome == TO_BE_READ))
    path = root / "feedback" / student / name / f"{name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
