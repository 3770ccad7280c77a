"""The page for teachers: what to do stands first; students' work stays out of the repository."""

import re
import shutil
import subprocess
import sys

from hand_in import REPOSITORY

TEXT = (REPOSITORY / "notebooks/assignments/README.md").read_text()


def test_what_a_teacher_does_comes_first():
    steps = ["make assignments", "handed-in/ada/ps1.ipynb", "make grade SUBMISSIONS=handed-in",
             "Formgrader", "handed-in-marks/feedback/ada/ps1/ps1.html",
             "handed-in-marks/totals.csv"]
    places = [TEXT.index(step) for step in steps]
    assert places == sorted(places)


def test_git_and_lint_leave_students_work_alone(tmp_path):
    folders = set(re.findall(r"\b(handed-in[\w-]*|submitted)\b", TEXT))
    assert folders == {"handed-in", "handed-in-marks", "submitted"}
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def look():
        """(what git would add, what ruff says)"""
        git = subprocess.run(["git", "status", "--porcelain", "-uall"], cwd=tmp_path,
                             capture_output=True, text=True, check=True)
        ruff = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache",
                               "--no-respect-gitignore", "--output-format", "concise"],
                              cwd=tmp_path, capture_output=True, text=True)
        return git.stdout, ruff.stdout

    (tmp_path / "ours.py").write_text("import os, sys\n")
    before = look()
    assert "ours.py" in before[0] and "ours.py" in before[1]
    for folder in folders:
        for path in ("ada/ps1.ipynb", "ada/helper.py", "ps1/ps1.py", "marks.csv"):
            (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / path).write_text("import os, sys\n")
    (tmp_path / "ps1").mkdir()
    (tmp_path / "ps1/ps1.ipynb").write_text("{}")     # the zip, unpacked in a clone
    assert look() == before
    source = "notebooks/assignments/source/ps9/ps9.py"
    (tmp_path / source).parent.mkdir(parents=True)
    (tmp_path / source).touch()
    assert source in look()[0]
