"""What is asked for, what is locked, and that `helpers` is found."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def read_lock(build):
    """A lock as [(requirement, how many hashes it has), ...]: one for each platform."""
    lock = []
    for entry in re.split(r"\n(?=\S)", (ROOT / f"requirements/{build}.txt").read_text().strip()):
        hashes = len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry))
        lock.append((Requirement(entry.split("\\")[0].strip()), hashes))
    return lock


LOCKS = {build: read_lock(build) for build in ("cpu", "gpu")}
builds = pytest.mark.parametrize("build", LOCKS)


@builds
def test_every_direct_dependency_has_a_reason_and_is_locked_as_asked(build):
    lines = [line for name in (build, "common")
             for line in (ROOT / f"requirements/{name}.in").read_text().splitlines()
             if line.strip() and line[0] not in "#-"]
    assert len(lines) > 10
    for line in lines:
        asked, _, reason = line.partition("#")
        assert reason.strip(), f"{line} has no reason beside it"
        asked = Requirement(asked.strip())
        locked = [entry for entry, _ in LOCKS[build]
                  if canonicalize_name(entry.name) == canonicalize_name(asked.name)]
        assert locked, f"{asked} is not in {build}.txt: make lock"
        for entry in locked:
            (pin,) = entry.specifier
            assert pin.version in asked.specifier, f"{build}.txt has {entry}: make lock"


@builds
def test_the_lock_pins_and_hashes_everything_and_names_no_address(build):
    for entry, hashes in LOCKS[build]:
        assert [pin.operator for pin in entry.specifier] == ["=="] and not entry.url, entry
        assert hashes, f"{entry.name} has no hash"
    text = (ROOT / f"requirements/{build}.txt").read_text()
    assert not re.findall(r"\S+://\S*|^--?[a-z].*", text, re.MULTILINE)


def test_the_builds_differ_in_mxnet_and_its_libraries_only():
    cpu, gpu = ({str(entry) for entry, _ in LOCKS[build]} for build in ("cpu", "gpu"))
    assert {pin.split("==")[0] for pin in cpu - gpu} == {"mxnet"}
    more = {pin.split("==")[0] for pin in gpu - cpu}
    assert "mxnet-cu112" in more
    assert all(re.fullmatch("mxnet-cu112|nvidia-.*-cu11", name) for name in more)


def test_nothing_here_uses_the_old_requests():
    """As notebooks/src/README.md says of its advisories: nor a downloader that uses it."""
    for folder in ("helpers", "notebooks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"^\s*(import|from) requests\b|\bd2l\.(load_data|download|DATA_)"
                                 r"|\bvision\.\w*(MNIST|CIFAR)|pretrained=True", path.read_text(),
                                 re.MULTILINE), path


def run_python(folder, *arguments, **environment):
    """What it prints, with these variables and without the reader's own of the same kind."""
    kept = {key: value for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "JUPYTER_CONFIG_PATH")}
    done = subprocess.run([sys.executable, *arguments], env={**kept, **environment}, cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_helpers_is_found_from_any_folder(tmp_path):
    found = run_python(tmp_path, "-c", "import helpers; print(helpers.__file__)")
    assert Path(found.strip()).resolve() == ROOT / "helpers/__init__.py"


CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())


def test_conda_gets_the_same_lock():
    assert CONDA["dependencies"][0] == "python=3.11"
    assert {"pip": ["-r requirements/gpu.txt"]} in CONDA["dependencies"]


@pytest.mark.parametrize("folder, module, file", [
    (".", "helpers", "helpers/__init__.py"),
    ("notebooks", "helpers", "helpers/__init__.py"),
    ("notebooks/deeper", "helpers", "helpers/__init__.py"),
    ("notebooks/deeper", "ranks", "notebooks/ranks.py")])
def test_conda_finds_helpers_and_the_programs_of_a_chapter(folder, module, file):
    if module == "ranks":
        pytest.importorskip("torch")
    # -S: the packages of this environment, but not its .pth files, by which it finds the course.
    # -P: nothing from the folder itself, as for a program that is elsewhere.
    path = os.pathsep.join([CONDA["variables"]["PYTHONPATH"], sysconfig.get_path("purelib")])
    found = run_python(ROOT / folder, "-SP", "-c", f"import {module}; print({module}.__file__)",
                       PYTHONPATH=path)
    assert Path(found.strip()).resolve() == ROOT / file


def test_conda_opens_jupyterlab_with_the_courses_settings(tmp_path):
    settings = json.loads(run_python(
        ROOT, "-m", "jupyterlab", "--show-config-json", JUPYTER_CONFIG_DIR=str(tmp_path),
        JUPYTER_RUNTIME_DIR=str(tmp_path), **CONDA["variables"]))
    assert settings["ServerApp"]["default_url"] == "/lab/tree/notebooks/start.md"
    assert settings["ServerApp"]["root_dir"] == str(ROOT)
