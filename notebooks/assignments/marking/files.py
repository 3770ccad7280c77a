"""Finds what was handed in, and reads it: whatever a file is called, packed or not.

A submission is STUDENT/ps1.ipynb, nbgrader's STUDENT/ps1/ps1.ipynb, or else the only notebook or
zip of the student's whose name can mean ps1: "ps1 (1).ipynb", ps1_final.ipynb, ps1.zip, and
ada_123_assignsubmission_file_ps1.ipynb, as learning platforms have it. Whose it is may be said by
a platform too: Moodle's folders and Canvas's files, which all lie in one folder.
"""

import errno
import io
import json
import os
import re
import stat
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from marking import harmless, notebook
from marking.assignment import list_names, read_assignment
from marking.notebook import Refused

LARGEST = 64 * 2**20   # bytes of a submission, packed and unpacked; its outputs are most of it
MOST = 1000            # files in a zip
DEEPEST = 3            # folders below SUBMISSIONS in which somebody's file is looked for
NOTEBOOK = re.compile(r"(.*)\.ipynb(\.txt|\.json)?", re.DOTALL)   # as some browsers save it
PACKED = re.compile(r"(.*)\.zip", re.DOTALL)
# "Jane Doe_123456_assignsubmission_file_" is a folder, or goes on as a file's name.
MOODLE = re.compile(r"(?P<student>.+?)_(?P<number>\d+)_assignsubmission_[a-z]+(_(?P<file>.*))?")
CANVAS = re.compile(r"(?P<student>.+?)(?P<late>_LATE)?_(?P<number>\d+)_\d+_(?P<file>.+)")


class Submission(NamedTuple):
    student: str
    assignment: str
    path: tuple | None     # names of folders and file; None: missing, or several could be meant
    doubtful: tuple = ()   # the paths of these


class Unread(NamedTuple):
    """A file that isn't read. student: "" where it is nobody's; assignment: None where its name
    doesn't say."""

    student: str
    assignment: str | None
    path: tuple
    why: str


class Handed(NamedTuple):
    """All that lies in a folder of submissions.

    submissions: those missing included, as what one student has handed in, every student should
    have, those of unusable folders too. unusable: {student: why the folder can't be used}.
    renamed: {name in the folder, as a learning platform made it: the student that it is from}.
    """

    folder: Path
    submissions: list
    unusable: dict
    unread: list
    renamed: dict


def find_submissions(folder):
    """`Handed` in below `folder`."""
    if (folder / "submitted").is_dir():  # nbgrader's course folder
        folder = folder / "submitted"
    folder = folder.resolve()            # it may be a link: it is the teacher's
    found, unusable, unread = [], {}, []
    people, renamed = find_people(folder)
    for student, places in sorted(people.items()):
        why = find_fault_in_places(folder, student, places)
        if why:   # nothing is looked for in it, so that it says of no assignment "handed in"
            unusable[student] = why
            found += [Submission(student, name, None) for name in list_names()]
            continue
        files = [path for place in places for path in list_files(folder, (place,))
                 if is_work(path[-1])]
        untouched = []
        for name in list_names():
            paths = [(place, *rest) for place in places
                     for rest in ((f"{name}.ipynb",), (name, f"{name}.ipynb"))]
            there = [path for path in paths if is_there(folder.joinpath(*path))]
            if len(there) > 1:
                unusable[student] = (f"it has two of {name}, "
                                     f"{' and '.join(map(show, there))}")
            named = [path for path in files if find_meant(path[-1]) == name]
            if len(named) > 1 and len(there) < 2:   # "ps1 (1).ipynb" beside the hand-out
                written = [path for path in named if not is_untouched(folder, path, name)]
                if 0 < len(written) < len(named):
                    untouched += [path for path in named if path not in written]
                    named, there = written, [path for path in there if path in written]
            meant = there[:1] or named
            found.append(Submission(student, name, meant[0], ()) if len(meant) == 1 else
                         Submission(student, name, None, tuple(meant)))
        if student not in unusable:
            unread += find_unread(student, files, found[-len(list_names()):], untouched)
    for name in sorted(os.listdir(folder)):
        if is_work(name) and not name.startswith(".") and not any(
                name in places for places in people.values()):
            unread.append(Unread("", find_meant(name), (name,), "it lies in no student's folder"))
    handed_in = {one.assignment for one in found if one.path or one.doubtful}
    return Handed(folder, [one for one in found if one.assignment in handed_in], unusable, unread,
                  renamed)


def find_people(folder):
    """({student: names in `folder` of what is theirs}, {name: student} of what a platform named).

    Who shares a name with somebody else keeps the platform's number.
    """
    people, named, numbers = {}, {}, {}
    for name in sorted(os.listdir(folder)):
        kind = os.lstat(folder / name).st_mode
        if name.startswith("."):
            continue
        match = MOODLE.fullmatch(name)
        if stat.S_ISDIR(kind) or stat.S_ISLNK(kind):
            if not match:
                people[name] = [name]
        else:
            match = match or CANVAS.fullmatch(name)
            match = match if match and is_work(match["file"] or "") else None
        if match:
            named[name] = match
            numbers.setdefault(match["student"], set()).add(match["number"])
    alone = {student for student, its in numbers.items() if len(its) == 1} - set(people)
    renamed = {}
    for name, match in named.items():
        student = match["student"]
        renamed[name] = student if student in alone else f"{student}_{match['number']}"
        people.setdefault(renamed[name], []).append(name)
    return people, renamed


def find_fault_in_places(folder, student, places):
    """Why what is a student's can't be used, or None."""
    for place in places:
        kind = os.lstat(folder / place).st_mode
        if stat.S_ISLNK(kind):
            return "it is a link"
        if stat.S_ISDIR(kind) and not os.access(folder / place, os.R_OK | os.X_OK):
            return "there is no permission to read it"
    return harmless.find_fault_in_name(student)


def list_files(folder, path):
    """Paths of all that lies at or below a path and is no folder; links are not followed."""
    if not folder.joinpath(*path).is_dir():
        yield path
    with suppress(OSError):
        for entry in sorted(os.scandir(folder.joinpath(*path)), key=lambda entry: entry.name):
            if entry.name.startswith((".", "__")):   # checkpoints; what a Mac packs
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield (*path, entry.name)
            elif len(path) < DEEPEST:
                yield from list_files(folder, (*path, entry.name))


def find_meant(name):
    """The assignment that a notebook's or a zip's name means; None where it says none, or two."""
    match = NOTEBOOK.fullmatch(name.lower()) or PACKED.fullmatch(name.lower())
    found = set(find_numbers(match[1])) if match else set()
    return found.pop() if len(found) == 1 and found <= set(list_names()) else None


def find_numbers(name):
    return re.findall(r"(?<![a-z0-9])ps\d+", name.lower())


def is_work(name):
    """Whether a file looks like something that was meant to be marked."""
    return bool(NOTEBOOK.fullmatch(name.lower()) or PACKED.fullmatch(name.lower())
                or find_numbers(name))


def is_untouched(folder, path, name):
    """Whether a file is an assignment's hand-out, as it was handed out."""
    if not NOTEBOOK.fullmatch(path[-1].lower()):
        return False
    with suppress(Refused, OSError):
        text, _ = read_submission(folder, Submission("", name, path))
        return notebook.is_untouched(read_assignment(name), text)
    return False


def find_unread(student, files, submissions, untouched):
    """`Unread` of one student's files, for all that aren't read, and why not. untouched: those of
    them that are as they were handed out, beside others."""
    read = {one.path: one for one in submissions if one.path}
    unread = []
    for path in files:
        meant = find_meant(path[-1])
        (one,) = [one for one in submissions if one.assignment == meant] or [None]
        if any(one[:len(path)] == path for one in read):   # it, or a link on the way to it
            continue
        if path in untouched:
            why = "it is as it was handed out"
        elif one and one.path:
            why = f"{show(one.path)} is what was read"
        elif one:
            why = "another file could be meant as well"
        elif NOTEBOOK.fullmatch(path[-1].lower()) or PACKED.fullmatch(path[-1].lower()):
            why = "its name doesn't say which assignment it is: ps1.ipynb would"
        else:
            why = "it is no notebook"
        unread.append(Unread(student, meant, path, why))
    return unread


def show(path):
    """A student's file as it is named to its author."""
    return "/".join(path[1:] or path)


def is_there(path):
    """Whether there is something, be it a link to nothing or in a folder that can't be read."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def explain_doubt(one):
    """Why a submission isn't read of which several could be meant."""
    names = " and ".join(show(path) for path in one.doubtful)
    return (f"which of {names} is meant can't be told: hand in one of them, as "
            f"{one.assignment}.ipynb")


def read_submission(folder, one):
    """(the notebook's text, sentences for its author on where that was) of a submission.

    Raises Refused, and OSError where the file is there and this machine can't read it.
    """
    content, notes = read_file(folder, one.path), []
    if one.path[-1] != f"{one.assignment}.ipynb":
        notes = [f"Read: {show(one.path)}"]
    if PACKED.fullmatch(one.path[-1].lower()):
        inside, content = unpack(content, one.path[-1], one.assignment)
        notes = [f"Read: {inside} in {show(one.path)}"]
    # With or without a byte-order mark.
    return content.decode(json.detect_encoding(content), "replace").removeprefix("\ufeff"), notes


def read_file(folder, path):
    """The bytes of a regular file, reached through no link, and not too large."""
    with ExitStack() as opened:
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
            content = bytearray()
            while piece := os.read(place, 2**20):
                content += piece
                check_size(len(content), path[-1])
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise Refused(f"not a regular file: {error.strerror}") from error
            raise
    return bytes(content)


def check_size(size, name):
    if size > LARGEST:
        raise Refused(f"{name} is larger than {LARGEST // 2**20} MiB: clear its outputs (menu "
                      "Edit, Clear Outputs of All Cells), save it, and hand in again")


def unpack(content, name, meant):
    """(path, bytes) of the notebook in a zip, in memory. Raises Refused."""
    if content.count(b"PK\x01\x02") > MOST:   # before all of them are listed
        raise Refused(f"{name} has more than {MOST} files in it: hand in {meant}.ipynb")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            entries = {}
            for one in packed.infolist():
                path = one.filename.replace("\\", "/")   # Windows has packed it
                check_entry(one, path, name)
                entries[path] = one
            check_size(sum(one.file_size for one in entries.values()), f"{name}, unpacked,")
            path = choose(list(entries), name, meant)
            with packed.open(entries[path]) as file:
                return path, file.read(LARGEST + 1)   # never more than it said
    except Refused:
        raise
    except Exception as error:   # whatever is wrong with it
        raise Refused(harmless.shorten(f"{name} can't be unpacked: {type(error).__name__}: "
                                       f"{error}. Hand in {meant}.ipynb")) from error


def check_entry(one, path, name):
    """Raises Refused for what a zip like the one that was handed out hasn't got."""
    if stat.S_ISLNK(one.external_attr >> 16):
        raise Refused(f"{path} in {name} is a link: hand in the file itself")
    if path.startswith("/") or ".." in path.split("/") or re.match("[A-Za-z]:", path):
        raise Refused(f"{path} in {name} leads out of the folder in which it is unpacked")
    if one.flag_bits & 1 or one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refused(f"{path} in {name} is packed in a way that isn't read here, perhaps with a "
                      "password: hand in the notebook itself")


def choose(paths, name, meant):
    """The one notebook in a zip that can be meant. Raises Refused."""
    paths = [path for path in paths if NOTEBOOK.fullmatch(path.lower())
             and not any(part.startswith((".", "__")) for part in path.split("/"))]
    for chosen in ([path for path in paths if PurePosixPath(path).name == f"{meant}.ipynb"],
                   [path for path in paths if find_meant(PurePosixPath(path).name) == meant],
                   paths):
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            raise Refused(f"which of {' and '.join(chosen[:5])} in {name} is meant can't be told: "
                          f"hand in one of them, as {meant}.ipynb")
    raise Refused(f"{name} has no notebook in it: hand in {meant}.ipynb")
