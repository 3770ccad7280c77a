"""python -m marking release [FOLDER] | grade SUBMISSIONS [OUT]"""

import sys
from pathlib import Path

from marking.process import REPOSITORY


def release_all(folder=REPOSITORY / "build/assignments"):
    """Make what students get, and a zip of each assignment."""
    from marking import assignment, gradebook

    folder = Path(folder).absolute()
    try:
        gradebook.release(folder, assignment.list_names())
    except FileExistsError as error:
        raise SystemExit(str(error)) from None
    for name in assignment.list_names():
        packed = gradebook.pack(folder, name)
        print(f"{folder}/release/{name}, and zipped: {packed.name}")


def grade_all(folder, out=None):
    """Mark a folder of submissions."""
    from marking import grade

    folder = Path(folder).absolute()
    out = Path(out).absolute() if out else folder.with_name(folder.name + "-marks")
    raise SystemExit(grade.mark(folder, out))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["release"] | ["release", _]:
            release_all(*sys.argv[2:])
        case ["grade", _] | ["grade", _, _]:
            grade_all(*sys.argv[2:])
        case _:
            raise SystemExit(__doc__)
