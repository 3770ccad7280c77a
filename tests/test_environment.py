"""The environment: what is asked for, what is locked, what is installed, and how it is set up."""

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
SOURCES = [path for folder in ("helpers", "notebooks", "tests") for path in
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
    return found - ours - set(sys.stdlib_module_names)


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
    """Whose advisories README names. It has it for d2l, whose downloader is not called either."""
    import helpers  # noqa: F401
    from d2l import mxnet as d2l

    assert "requests" not in imported()
    text = "".join(path.read_text() for path in SOURCES if path != Path(__file__))
    names = set(re.findall(r"\bd2l\.([A-Za-z]\w*)", text)) - {"mxnet"}
    assert {"Animator", "Timer", "resnet18"} <= names, "what the chapters use is found"
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
    assert "mxnet-cu112" in more and len(more) == 11
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


# --- setup.sh chooses a Python that works ---------------------------------------------------

BASE_PYTHON = sys._base_executable
WORKS = f'exec "{BASE_PYTHON}" "$@"'
FAILS = "echo 'python3.11: command not found' >&2; exit 127"
# Runs what it is given, as a Python of another version would.
OTHER_VERSION = f"""exec "{BASE_PYTHON}" -c '
import sys
sys.version_info = (3, 12, 1)
exec(sys.argv[2])' "$@"
"""


def find_python(tmp_path, launchers, **environment):
    """Run `setup.sh --find-python` where the PATH holds `launchers` {name: script} only."""
    for name, script in launchers.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    folders = dict.fromkeys(str((tmp_path / name).parent) for name in launchers)
    return subprocess.run(
        ["/bin/sh", str(SETUP), "--find-python"], capture_output=True, text=True,
        env={"PATH": ":".join(folders), "HOME": str(tmp_path), **environment})


@pytest.mark.parametrize("launchers", [
    {"a/python3.11": WORKS},
    {"a/python3.11": FAILS, "a/python3": WORKS},
    {"a/python3.11": FAILS, "b/python3.11": WORKS},
    {"a/python3.11": FAILS, "a/python3": OTHER_VERSION, "b/python": WORKS},
])
def test_setup_passes_over_pythons_that_do_not_run(tmp_path, launchers):
    result = find_python(tmp_path, launchers)
    assert (result.returncode, result.stdout.strip()) == (0, BASE_PYTHON), result.stderr


def test_setup_takes_the_python_it_is_given(tmp_path):
    given = tmp_path / "mine"
    given.symlink_to(BASE_PYTHON)
    launchers = {"a/python3.11": FAILS}
    assert find_python(tmp_path, launchers).returncode == 1
    result = find_python(tmp_path, launchers, PYTHON=str(given))
    assert result.returncode == 0
    assert os.path.realpath(result.stdout.strip()) == os.path.realpath(BASE_PYTHON)


def test_setup_finds_the_pythons_of_a_version_manager(tmp_path):
    python = tmp_path / ".pyenv/versions/3.11.7/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(BASE_PYTHON)
    result = find_python(tmp_path, {"shims/python3.11": FAILS})
    assert result.returncode == 0


def test_setup_finds_none_where_there_is_none(tmp_path):
    result = find_python(tmp_path, {"a/python3.11": FAILS, "a/python3": OTHER_VERSION})
    assert (result.returncode, result.stdout) == (1, "")


# --- setup.sh is interrupted, doubled, without a network -------------------------------------

# In place of uv and pip: what they leave behind comes step by step, each in the file `steps`.
# At step number DIE_AT it and setup.sh are killed; at step FAIL_AT it fails as without a network.
STAND_IN = """\
#!{python} -S
import os, subprocess, sys, time

def step(name):
    with open("steps", "a+") as steps:
        steps.write(name + "\\n")
        steps.seek(0)
        number = len(steps.readlines())
    if number == int(os.environ.get("DIE_AT", 0)):
        os.kill(os.getppid(), 9)
        os._exit(9)
    if number == int(os.environ.get("FAIL_AT", 0)):
        sys.exit("error: no answer")
    time.sleep(float(os.environ.get("SLOW", 0)))

def install(*names):
    for name in names:
        step(name)
        os.makedirs(site, exist_ok=True)
        with open(os.path.join(site, name + ".py"), "w") as module:
            module.write("whole = True")

site = ".venv/lib/python3.11/site-packages"
if sys.argv[1] == "--version":
    pass
elif sys.argv[1] == "venv":
    step("folder")
    os.mkdir(".venv")
    step("python")
    subprocess.run(["{python}", "-m", "venv", "--without-pip", ".venv"], check=True)
elif sys.argv[1:3] == ["pip", "install"] and sys.argv[-1] == "pip":
    install()
    with open(__file__) as this, open(os.path.join(site, "pip.py"), "w") as pip:
        pip.write(this.read())
elif sys.argv[1:3] == ["pip", "install"]:
    install("numpy", "mxnet", "d2l")
else:
    install("torch_first", "torch")
"""
WHOLE = {"numpy.py", "mxnet.py", "d2l.py", "many_devices.pth"}
TORCH = WHOLE | {"pip.py", "torch_first.py", "torch.py"}


@pytest.fixture
def folder(tmp_path):
    """What setup.sh needs of the repository, with the stand-in for uv on the PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(STAND_IN.replace("{python}", BASE_PYTHON))
    (tmp_path / "bin/uv").chmod(0o755)
    for name in ("requirements/setup.sh", "requirements/cpu.txt", "requirements/gpu.txt",
                 "helpers/gpu.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def begin(folder, **environment):
    path = f"{folder}/bin:{os.environ['PATH']}"
    settings = {"TORCH": "0", "GPU": "0", "PYTHON": BASE_PYTHON, **environment}
    return subprocess.Popen(["/bin/sh", "requirements/setup.sh"], cwd=folder, text=True,
                            env={**os.environ, "PATH": path, **settings},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def set_up(folder, **environment):
    """(exit status, what it said)"""
    process = begin(folder, **environment)
    said = "".join(process.communicate(timeout=60))
    return process.returncode, said


def installed(folder):
    return {path.name for path in folder.glob(".venv/lib/python3.11/site-packages/*.p*")}


@pytest.mark.parametrize("torch", ["0", "1"])
@pytest.mark.parametrize("number", range(1, 8))
def test_setup_killed_at_any_step_and_run_again_ends_well(folder, number, torch):
    status, _ = set_up(folder, TORCH="1", DIE_AT=str(number))
    assert status == -9
    assert set_up(folder, TORCH=torch)[0] == 0
    assert installed(folder) == (TORCH if torch == "1" else WHOLE)
    steps = (folder / "steps").read_text()
    assert set_up(folder, TORCH=torch) == (0, "")
    assert (folder / "steps").read_text() == steps, "nothing is done twice"


@pytest.mark.parametrize("number", range(1, 8))
def test_setup_without_a_network_says_so_and_works_when_it_is_back(folder, number):
    status, said = set_up(folder, TORCH="1", FAIL_AT=str(number))
    assert status == 1
    (sentence,) = [line for line in said.splitlines() if line.startswith("setup: ")]
    assert "check the network" in sentence or number < 3 and "uv could not fetch one" in sentence
    assert set_up(folder, TORCH="1")[0] == 0
    assert installed(folder) == TORCH


def test_what_worked_before_pytorch_could_not_be_fetched_still_works(folder):
    assert set_up(folder)[0] == 0
    assert set_up(folder, TORCH="1", FAIL_AT="6")[0] == 1
    assert set_up(folder) == (0, ""), "nothing had changed, so nothing is made anew"


def test_two_setups_at_once_do_the_work_once(folder):
    both = [begin(folder, SLOW="0.2") for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert (folder / "steps").read_text().split() == ["folder", "python", "numpy", "mxnet", "d2l"]
    assert sorted("waiting" in text for text in said) == [False, True]
    assert installed(folder) == WHOLE


def test_another_lock_makes_it_anew_and_keeps_pytorch(folder):
    assert set_up(folder, TORCH="1")[0] == 0
    leftover = folder / ".venv/lib/python3.11/site-packages/leftover.py"
    leftover.touch()
    assert set_up(folder, GPU="1")[0] == 0
    assert installed(folder) == TORCH


def test_a_moved_folder_makes_its_environment_anew(folder):
    assert set_up(folder)[0] == 0
    moved = folder.rename(folder.with_name("moved"))
    assert "Ready" in set_up(moved)[1]
    assert (moved / ".venv/lib/python3.11/site-packages/many_devices.pth").read_text().strip() == (
        str(moved))
