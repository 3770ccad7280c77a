"""The marking's modules depend in one direction, and load no more than they need; students' work
stays out of the repository."""

import ast
import shutil
import subprocess
import sys

import marking
import pytest
from hand_in import REPOSITORY

ASSIGNMENTS = REPOSITORY / "notebooks/assignments"

ORDER = [line.split()[0] for line in marking.__doc__.splitlines()
         if line.startswith("    ") and not line.split()[0].startswith("python")]


def test_each_module_uses_only_those_above_it():
    files = {path.stem for path in (ASSIGNMENTS / "marking").glob("*.py")}
    assert set(ORDER) == files - {"__init__", "__main__"}
    for place, name in enumerate(ORDER):
        text = (ASSIGNMENTS / "marking" / f"{name}.py").read_text()
        used = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("marking"):
                used |= ({alias.name for alias in node.names} if node.module == "marking"
                         else {node.module.split(".")[1]})
        assert used <= set(ORDER[:place]), name


@pytest.mark.parametrize("code, absent", [
    ("from marking import assignment; assignment.read_assignment('ps1')",
     ["mxnet", "nbgrader", "sqlalchemy"]),   # jupytext itself loads jupyter_server
    ("from marking import judge; judge.load_tests('ps4')",
     ["mxnet", "nbgrader", "sqlalchemy", "jupytext", "nbformat", "jupyter_server"])])
def test_no_more_is_loaded_than_is_needed(code, absent):
    code += "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ASSIGNMENTS, capture_output=True,
                          text=True, check=True)
    assert not set(absent) & set(done.stdout.split())


def test_git_and_lint_leave_students_work_alone(tmp_path):
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    theirs = ["handed-in/ada/ps1.ipynb", "handed-in/ada/helper.py", "handed-in-marks/marks.csv",
              "submitted/ps1/ps1.py", "ps1/ps1.ipynb"]   # the last is the zip, unpacked in a clone
    for path in ["ours.py", *theirs]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("import os, sys\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    git = subprocess.run(["git", "status", "--porcelain", "-uall"], cwd=tmp_path,
                         capture_output=True, text=True, check=True).stdout
    ruff = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format",
                           "concise", "--no-respect-gitignore"], cwd=tmp_path,
                          capture_output=True, text=True).stdout
    assert "ours.py" in git and "ours.py" in ruff
    assert not any(path in git or path in ruff for path in theirs)
