"""Makes what students get: notebooks without solutions and hidden tests, and the helpers.

    python release.py [FOLDER]      by default build/assignments

nbgrader takes out solutions and hidden tests; FOLDER gets its layout (source/, release/,
gradebook.db), and a zip of each assignment.
"""

import logging
import os
import shutil
import sys
import zipfile
from pathlib import Path

import nbformat
from nbgrader.apps import NbGraderAPI
from traitlets.config import Config

import judge
import sandbox

REPOSITORY = judge.HERE.parents[1]
STUB = """# Your code goes here, in place of the next line.
raise NotImplementedError("not written yet")"""
OURS = "# Written by the course; JupyterLab's Formgrader reads it when started from this folder."
CONFIG = OURS + """
c = get_config()
c.CourseDirectory.root = {root!r}
c.HTMLExporter.sanitize_html = True
"""


def nbgrader(root):
    """nbgrader at work in the folder `root`, saying only what goes wrong."""
    # It starts alembic, which makes the gradebook, by name.
    os.environ["PATH"] = os.pathsep.join([f"{sys.prefix}/bin", os.environ.get("PATH", "")])
    config = Config()
    config.CourseDirectory.root = str(root)
    config.CourseDirectory.db_url = f"sqlite:///{root}/gradebook.db"
    config.ClearSolutions.code_stub = {"python": STUB}
    config.HTMLExporter.sanitize_html = True  # an answer may hold anything
    config.NbGraderAPI.log_level = logging.ERROR
    config.Application.log_level = logging.ERROR
    return NbGraderAPI(config=config)


def release(root, names):
    """Write the student versions of the assignments `names` to `root`/release.

    Ends the program where `root` has assignments that this didn't put there: they are kept.
    """
    config = root / "nbgrader_config.py"
    ours = config.exists() and config.read_text().startswith(OURS)
    if (root / "source").exists() and not ours:
        sys.exit(f"{root}: source/ in it is not from here, and would be overwritten; choose "
                 "another folder (OUT=folder)")
    root.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG.format(root=str(root)))
    tool = nbgrader(root)
    for name in names:
        source = root / "source" / name
        shutil.rmtree(source, ignore_errors=True)
        (source / "helpers").mkdir(parents=True)
        for helper in sandbox.HELPERS:
            shutil.copy(REPOSITORY / "helpers" / helper, source / "helpers")
        nbformat.write(judge.notebook(name), source / f"{name}.ipynb")
        outcome = tool.generate_assignment(name)
        if not outcome["success"]:
            raise RuntimeError(f"nbgrader could not make {name}:\n{outcome['log']}")


def pack(root, name):
    """A zip of one assignment as released, in a folder of its name."""
    with zipfile.ZipFile(root / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted((root / "release" / name).rglob("*")):
            packed.write(path, Path(name) / path.relative_to(root / "release" / name))
    return root / f"{name}.zip"


if __name__ == "__main__":
    folder = Path(sys.argv[1] if sys.argv[1:] else REPOSITORY / "build/assignments").absolute()
    release(folder, judge.names())
    for released in judge.names():
        print(f"{folder}/release/{released}, and zipped: {pack(folder, released).name}")
