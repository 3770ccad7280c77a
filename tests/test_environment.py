"""The environment: what is asked for, what is locked, and what is installed."""

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import gpu

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("helpers", "notebooks", "requirements", "tests") for path in
           (ROOT / folder).rglob("*.py") if ".ipynb_checkpoints" not in path.parts]
SETUP = ROOT / "requirements" / "setup.sh"


def read_lock(build):
    """A lock as {name: [(requirement, how many hashes it has), ...]}: one for each platform."""
    lock, path = {}, ROOT / f"requirements/{build}.txt"
    for entry in re.split(r"\n(?=\S)", path.read_text().strip()):
        requirement = Requirement(entry.split("\\")[0].strip())
        hashes = len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry))
        lock.setdefault(canonicalize_name(requirement.name), []).append((requirement, hashes))
    return lock


def read_direct(build):
    """The direct dependencies as [(requirement, the reason beside it), ...]."""
    lines = (ROOT / f"requirements/{build}.in").read_text().splitlines()
    assert lines.count("-r common.in") == 1
    lines += (ROOT / "requirements/common.in").read_text().splitlines()
    parts = [line.partition("#") for line in lines if line.strip() and line[0] not in "#-"]
    return [(Requirement(before.strip()), reason.strip()) for before, _, reason in parts]


LOCKS = {build: read_lock(build) for build in ("cpu", "gpu")}
HERE = LOCKS["gpu" if gpu.is_cuda_build() else "cpu"]
builds = pytest.mark.parametrize("build", LOCKS)


@builds
def test_every_direct_dependency_has_a_reason_and_is_locked_as_asked(build):
    direct = read_direct(build)
    assert len(direct) > 5
    for requirement, reason in direct:
        assert reason, f"{requirement.name} has no reason beside it in {build}.in"
        locked = LOCKS[build][canonicalize_name(requirement.name)]
        for entry, _ in locked:
            (pin,) = entry.specifier
            assert pin.version in requirement.specifier, f"the lock has {entry}: make lock"


# What deeper/05 tries to import, as old listings do, to show that it isn't there.
NOT_THERE = {"gluonbook", "utils"}


def imported():
    """The modules from elsewhere that the repository's own code imports, by their first names."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    ours = {path.stem for path in SOURCES}
    ours |= {path.parent.name for path in SOURCES if path.name == "__init__.py"}
    return found - ours - NOT_THERE - set(sys.stdlib_module_names)


def test_what_is_imported_is_asked_for():
    packages = metadata.packages_distributions()
    direct = {requirement.name for requirement, _ in read_direct("cpu")}
    direct |= {requirement.name for requirement, _ in read_direct("gpu")}
    for name in imported() - {"torch"}:   # setup.sh installs that one
        assert direct & {canonicalize_name(each) for each in packages[name]}, f"import {name}"


def test_what_is_asked_for_is_used():
    """By an import, by a command of that name, or as an extension or a theme in a setting."""
    modules = metadata.packages_distributions()
    used = {canonicalize_name(each) for name in imported() for each in modules.get(name, [])}
    settings = "".join((ROOT / name).read_text() for name in (
        "Makefile", "pyproject.toml", "notebooks/src/book/conf.py", "notebooks/src/build.py"))
    for requirement, _ in read_direct("cpu"):
        words = {requirement.name, requirement.name.replace("-", "_"),
                 requirement.name.replace("jupyter", "jupyter ")}
        assert requirement.name in used or any(
            re.search(rf"\b{word}\b", settings) for word in words), requirement.name


def test_nothing_here_uses_the_old_requests():
    """notebooks/src/README.md names its advisories. d2l needs it; its downloader isn't called."""
    import helpers  # noqa: F401
    from d2l import mxnet as d2l

    assert "requests" not in imported()
    text = "".join(path.read_text() for path in SOURCES if path != Path(__file__))
    names = set(re.findall(r"\bd2l\.([A-Za-z]\w*)", text)) - {"mxnet"}
    assert {"Animator", "Residual", "resnet18"} <= names, "what the chapters use is found"
    for name in names & set(vars(d2l)):
        thing = getattr(d2l, name)
        source = inspect.getsource(thing) if callable(thing) else name
        assert not re.search("request|download|DATA_|load_data", source), name
    # MXNet's data sets and models fetch with it, when made.
    assert not re.findall(r"\b(?:vision|model_zoo|utils)\.(?:\w*MNIST|CIFAR\w*|ImageRecord\w*|"
                          r"download|get_model)\b\(", text)


@builds
def test_the_lock_pins_and_hashes_everything(build):
    for entry, hashes in (item for entries in LOCKS[build].values() for item in entries):
        assert [pin.operator for pin in entry.specifier] == ["=="], entry
        assert hashes, f"{entry.name} has no hash"


@builds
def test_the_lock_names_no_address(build):
    text = (ROOT / f"requirements/{build}.txt").read_text()
    assert not re.findall(r"\S+://\S*|^--?[a-z].*| @ .*", text, re.MULTILINE)


def test_the_builds_differ_in_mxnet_and_its_libraries_only():
    def pins(build):
        return {str(entry) for entries in LOCKS[build].values() for entry, _ in entries}

    assert {pin.split("==")[0] for pin in pins("cpu") - pins("gpu")} == {"mxnet"}
    more = {pin.split("==")[0] for pin in pins("gpu") - pins("cpu")}
    assert "mxnet-cu112" in more
    assert all(re.fullmatch("mxnet-cu112|nvidia-.*-cu11", name) for name in more)


def test_what_is_installed_is_what_is_locked():
    wrong = []
    for entry, _ in (item for entries in HERE.values() for item in entries):
        if entry.marker is None or entry.marker.evaluate():
            try:
                version = metadata.version(entry.name)
            except metadata.PackageNotFoundError:
                version = "not there"
            if version not in [pin.version for pin in entry.specifier]:
                wrong.append(f"{entry.name}: {version}, locked {entry.specifier}")
    assert not wrong


def test_every_installed_package_has_what_it_needs():
    missing = []
    for distribution in metadata.distributions():
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                try:
                    version = metadata.version(requirement.name)
                except metadata.PackageNotFoundError:
                    version = None
                if version is None or not requirement.specifier.contains(version, True):
                    missing.append(f"{distribution.name} needs {requirement}, has {version}")
    assert not missing


@pytest.mark.skipif(not find_spec("torch"), reason="PyTorch is not installed: make setup TORCH=1")
def test_pytorch_is_the_one_that_setup_installs():
    (version,) = re.findall(r"^torch_version=(.+)$", SETUP.read_text(), re.MULTILINE)
    assert metadata.version("torch").split("+")[0] == version
    assert metadata.version("numpy") == "1.23.5", "pip left alone what is locked"


def test_conda_gets_the_same_python_and_the_same_lock():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    *plain, pip = conda["dependencies"]
    assert conda["name"] == "many-devices"
    assert plain == ["python=3.11", "pip"]
    assert pip == {"pip": ["-r requirements/gpu.txt"]}
    assert (ROOT / "requirements/gpu.txt").is_file()


def test_one_python_version_everywhere():
    assert sys.version_info[:2] == (3, 11)
    assert re.search(r"^python_version=3\.11\b", SETUP.read_text(), re.MULTILINE)
    assert "--python-version 3.11 " in (ROOT / "Makefile").read_text()
    assert 'target-version = "py311"' in (ROOT / "pyproject.toml").read_text()


def test_helpers_is_found_beside_the_notebooks_folder_under_conda():
    path = yaml.safe_load((ROOT / "environment.yml").read_text())["variables"]["PYTHONPATH"]
    found = subprocess.run(  # -S: without the environment's own packages and .pth files
        [sys.executable, "-S", "-c",
         "import importlib.util as u; print(u.find_spec('helpers').origin)"],
        env={**os.environ, "PYTHONPATH": path}, cwd=ROOT / "notebooks",
        capture_output=True, text=True, check=True)
    assert os.path.realpath(ROOT / "notebooks" / found.stdout.strip()) == str(
        ROOT / "helpers/__init__.py")


def test_helpers_can_be_imported_from_any_folder(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", "import helpers; print(helpers.__file__)"],
        env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == str(ROOT / "helpers/__init__.py"), found.stderr
