"""python -m marking release [FOLDER] | grade SUBMISSIONS [OUT]"""

import signal
import sys
from pathlib import Path

stopped = []   # signals that asked for an end: nbgrader takes a KeyboardInterrupt for its own


def stop(number, _):
    stopped.append(number)
    raise KeyboardInterrupt


def release_all(folder=None):
    """Make what students get, and a zip of each assignment."""
    from marking import assignment, gradebook, process

    folder = Path(folder or process.REPOSITORY / "build/assignments").absolute()
    try:
        gradebook.release(folder, assignment.list_names())
    except FileExistsError as error:
        raise SystemExit(str(error)) from None
    for name in assignment.list_names():
        packed = gradebook.pack(folder, name)
        print(f"{folder}/release/{name}, and zipped: {packed}")


def grade_all(folder, out=None):
    """Mark a folder of submissions."""
    from marking import grade

    folder = Path(folder).absolute()
    if not out and not folder.name:
        raise SystemExit(f"SUBMISSIONS={folder}: say where the marks are to go (OUT=folder)")
    out = Path(out).absolute() if out else folder.with_name(folder.name + "-marks")
    raise SystemExit(grade.mark(folder, out))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        match sys.argv[1:]:
            case ["release"] | ["release", _]:
                release_all(*sys.argv[2:])
            case ["grade", _] | ["grade", _, _]:
                grade_all(*sys.argv[2:])
            case _:
                raise SystemExit(__doc__)
    except BaseException as error:
        if not stopped or isinstance(error, SystemExit) and not error.code:
            raise
        print("Stopped.", file=sys.stderr)
        raise SystemExit(130) from None
