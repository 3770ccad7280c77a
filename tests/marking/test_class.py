"""A class of thirty: what students hand in, what each gets for it, and what the page says.

One run of `make grade`, as a teacher's. The table, the pages and the end of the run say the same.
"""

import csv
import html
import json
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from typing import NamedTuple

import pytest
from hand_in import REPOSITORY, find_cell, make_source, plain, put, run_make, strip
from marking import assignment

MINE = {e.name: e.answer for e in assignment.read_assignment("ps1").exercises}
ALL = {"even-values": 2, "even-care": 2, "uneven-values": 2, "uneven-care": 1, "pairs-values": 2,
       "pairs-care": 1}  # fmt: skip
CALLS_UNEVEN = """
def split_pairs(images, labels, order, devices):
    parts = [mx.nd.array(a.asnumpy()[order], a.context, a.dtype) for a in (images, labels)]
    return list(zip(*(split_uneven(part, devices) for part in parts)))
"""
COPIES = "def split_uneven(batch, devices):\n    return [batch.copyto(d) for d in devices]\n"
HANGS = MINE["even"].replace("### BEGIN SOLUTION", "while len(batch) == 8:\n        pass")
WORDS = "and 2 more to be read"


class Student(NamedTuple):
    """What one of them hands in, and what is due: the tests that are lost, and texts (regular
    expressions) in the table's reasons and on the page."""

    name: str
    content: object           # a notebook, text, bytes, a dict of several files; or a function that
                              # makes it, given the folder of the hand-out
    file: str = "ps1.ipynb"
    lost: tuple = ()          # beginnings of names of tests
    why: str = ""
    page: str = ""
    words: str = "to be read"
    assignment: str = "ps1"


EVERYTHING = ("even", "uneven", "pairs")


def pack(folder, change=None):
    """The zip that was handed out, with somebody's notebook in it."""
    path = folder / "packed.zip"
    shutil.copy(folder / "released/ps1.zip", path)
    with zipfile.ZipFile(folder / "released/ps1.zip") as source, \
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for one in source.infolist():
            content = source.read(one)
            if one.filename == "ps1/ps1.ipynb":
                content = dump(make_source())
            packed.writestr(one.filename, content)
        if change:
            change(packed)
    return path.read_bytes()


def add_link(packed):
    link = zipfile.ZipInfo("ps1/data")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    packed.writestr(link, "/etc/passwd")


def dump(content):
    return json.dumps(content).encode()


def odd_metadata():
    content = plain(make_source())
    content["cells"][0]["metadata"] = None
    content["cells"][3]["metadata"] = {"nbgrader": []}
    return content


def split(first, second, named):
    content = plain(make_source(even=first))
    cell = find_cell(content, "even")
    piece = {**cell, "source": second, "metadata": cell["metadata"] if named else {}}
    content["cells"].insert(content["cells"].index(cell) + 1, piece)
    return content


def twice_without_names():
    content = strip(make_source())
    content["cells"].append({"cell_type": "code", "metadata": {}, "source": MINE["even"] + "\n#"})
    return content


def with_outputs():
    content = plain(make_source())
    find_cell(content, "even-values")["outputs"] = [
        {"output_type": "display_data", "metadata": {},
         "data": {"image/png": "iVBORw0K" * 3_300_000}}]
    return content


BODY = MINE["even"].splitlines()
LOST_NAMES = "lost its cells' names"
CLASS = [
    Student("model", make_source()),
    # re-use
    Student("calls-her-own", make_source(pairs=CALLS_UNEVEN)),
    Student("calls-a-wrong-one", make_source(uneven=COPIES, pairs=CALLS_UNEVEN),
            lost=("uneven", "pairs"), why="uneven-values: .*shard 0 has shape.*"
            "pairs-values: .*array 0 of pair 0 has shape"),
    Student("above-breaks", make_source(uneven="1 / 0"), lost=("uneven",),
            why="not run, as the cell could not be read to its end: ZeroDivisionError"),
    Student("calls-what-broke", make_source(uneven="def split_uneven(:", pairs=CALLS_UNEVEN),
            lost=("uneven", "pairs"),
            why="It is in your cell 'uneven', which could not be read"),
    # What was printed is looked at twenty times a second.
    Student("prints-much", make_source(uneven=MINE["uneven"] + "\nprint('x' * 6 * 10**6)\n"
                                       "import time\ntime.sleep(1)", pairs=CALLS_UNEVEN),
            lost=("uneven", "pairs"), why="printed more than 5 MB"),
    # what the file is
    Student("utf8-mark", b"\xef\xbb\xbf" + dump(make_source())),
    Student("utf16-mark", dump(make_source()).decode().encode("utf-16")),
    Student("odd-metadata", odd_metadata()),
    Student("downloaded-twice", make_source(), "ps1 (1).ipynb", page=r"Read: ps1 \(1\)\.ipynb"),
    Student("final", make_source(), "ps1_final.ipynb", page=r"Read: ps1_final\.ipynb"),
    Student("platform", make_source(), "ada_123_assignsubmission_file_ps1.ipynb",
            page=r"Read: ada_123_assignsubmission_file_ps1\.ipynb"),
    Student("two-files", {"ps1 (1).ipynb": make_source(), "ps1_final.ipynb": make_source()},
            lost=EVERYTHING,
            why=r"which of ps1 \(1\).ipynb and ps1_final.ipynb is meant can't be told",
            page=r"Not read: ps1_final.ipynb: another file could be meant", words="not read"),
    Student("one-too-many", {"ps1.ipynb": make_source(), "ps1 (2).ipynb": make_source(even="")},
            page=r"Not read: ps1 \(2\).ipynb: ps1.ipynb is what was read"),
    Student("other-name", make_source(), "homework.ipynb", lost=EVERYTHING, why="not handed in",
            page="Not read: homework.ipynb: its name doesn't say which assignment",
            words="not read"),
    Student("zip", pack, "ps1.zip", page="Read: ps1/ps1.ipynb in ps1.zip"),
    Student("zip-with-link", lambda folder: pack(folder, add_link), "ps1.zip", lost=EVERYTHING,
            why="ps1/data in ps1.zip is a link", words="not read"),
    Student("zip-leads-out", lambda folder: pack(folder, lambda zip_: zip_.writestr("../x", "")),
            "ps1.zip", lost=EVERYTHING, why=r"\.\./x in ps1.zip leads out of the folder",
            words="not read"),
    Student("zip-too-large",
            lambda folder: pack(folder, lambda zip_: zip_.writestr("x", b" " * 2**26)), "ps1.zip",
            lost=EVERYTHING, why="unpacked, is larger than 64 MiB", words="not read"),
    Student("names-lost", strip(make_source()),
            page=f"{LOST_NAMES}.*what they define: even, uneven, pairs"),
    Student("names-lost-and-twice", twice_without_names(), lost=("even",),
            why=f"{LOST_NAMES}.*2 cells define split_even: copy your solutions into a fresh "
                "ps1.ipynb of the hand-out"),
    Student("large-outputs", lambda folder: with_outputs()),
    Student("split-by-command", split("\n".join(BODY[:3]), "\n".join(BODY[3:]), True),
            lost=("even",), why="'even' was split into 2 cells: join them"),
    Student("split-off-a-helper", split(MINE["even"].replace("len(batch)", "count(batch)"),
                                        "def count(batch):\n    return len(batch)", False),
            lost=("even",),
            why="name 'count' is not defined.*Another cell of your notebook has it"),
    Student("no-notebook", b"%PDF-1.7 \xff\xfe", lost=EVERYTHING,
            why="not a notebook as JupyterLab", words="not read"),
    # what is in it
    Student("no-words", make_source(why=""), words="no answer"),
    Student("placeholder", make_source(why=assignment.PLACEHOLDER), words="no answer"),
    Student("hangs", make_source(even=HANGS), lost=("even",),
            why=r"8 examples, devices .*: stopped: it (worked for more than 20|was not done "
                r"after 60) seconds, in split_even\(float32 array of shape \(8, 3, 2\)"
                ".*not run, as the solution was stopped before",
            page="<summary>The call that failed"),
    Student("timeit", make_source(even=MINE["even"] + "\n%timeit split_even(1, 2)"), lost=("even",),
            why="`%timeit split_even\\(1, 2\\)`, is a magic: Jupyter's, not Python's"),
    Student("shapes", make_source(uneven="def split_uneven(batch, devices):\n"
                                         "    return [mx.nd.dot(batch, mx.nd.ones((77, 1)))]"),
            lost=("uneven",), why=r"MXNetError: (?!.*\.\./src)(?!.*Traceback)(?!.*Stack)"),
]
NAMES = [one.name for one in CLASS]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """(students, {(student, assignment): rows}, the run, folder of marks)."""
    root = tmp_path_factory.mktemp("class")
    subprocess.run([sys.executable, "-m", "marking", "release", root / "released"], check=True,
                   capture_output=True, cwd=REPOSITORY / "notebooks/assignments")
    for one in CLASS:
        content = one.content(root) if callable(one.content) else one.content
        several = content if isinstance(content, dict) and "cells" not in content else {
            one.file: content}
        for file, content in several.items():
            put(root / "handed-in", one.name, content, file)
    begin = time.monotonic()
    done = run_make(root / "handed-in")
    done.seconds = time.monotonic() - begin
    rows, out = {}, root / "handed-in-marks"
    with open(out / "marks.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["student"], []).append(row)
    yield {one.name: one for one in CLASS}, rows, done, out
    shutil.rmtree(root)


def read_page(out, name):
    return html.unescape((out / f"feedback/{name}/ps1/ps1.html").read_text())


def test_all_were_marked(marked, capsys):
    students, rows, done, _ = marked
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(rows) == sorted(NAMES)
    with capsys.disabled():
        print(f"\na class of {len(students)} marked in {done.seconds:.0f} s")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_student_gets(marked, name):
    students, rows, _, _ = marked
    tests = {row["exercise"]: row for row in rows[name] if row["exercise"] in ALL}
    due = {key: 0 if key.startswith(tuple(f"{one}-" for one in students[name].lost)) else points
           for key, points in ALL.items()}
    assert {key: float(row["points"]) for key, row in tests.items()} == due
    reasons = " ".join(f"{key}: {row['why not']}" for key, row in tests.items() if row["why not"])
    assert re.search(students[name].why, reasons), reasons
    assert bool(reasons) == bool(students[name].lost)
    (words,) = [row for row in rows[name] if row["exercise"] == "why"]
    assert (words["points"], words["why not"]) == {
        "to be read": ("", "to be read"), "no answer": ("0", "no answer"),
        "not read": ("0", rows[name][0]["why not"])}[students[name].words]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_says(marked, name):
    students, rows, _, out = marked
    page = read_page(out, name)
    assert re.search(students[name].page, page, re.DOTALL), page[:3000]
    counted = [row for row in rows[name] if row["points"]]
    total, of = (sum(float(row[key]) for row in counted) for key in ("points", "of"))
    assert f"<h1>{total:g} of {of:g} points" in page      # one truth on page and in table
    assert (WORDS in page) == (students[name].words == "to be read")
    for row in rows[name]:
        if row["why not"] not in ("", "to be read"):
            assert row["why not"].lstrip("'") in page, row
    if students[name].words == "no answer":
        assert re.search(r'>0 of 2</td>\s*<td>no answer<', page)


def test_files_that_were_not_read_are_named_at_the_end(marked):
    _, rows, done, _ = marked
    due = {"two-files/ps1 (1).ipynb", "two-files/ps1_final.ipynb", "one-too-many/ps1 (2).ipynb",
           "other-name/homework.ipynb"}
    end = done.stdout.rpartition("Not read:\n")[2]
    assert {line.strip().partition(": ")[0] for line in end.splitlines() if line[:2] == "  "} == due
    assert {f"{name}/{row['why not'].partition(': ')[0]}" for name, its in rows.items()
            for row in its if row["outcome"] == "not read"} == due
