"""`make test-gpu-stack`: the build for GPUs, set up as on a machine with one, on one without.

A copy of the repository in build/gpu-stack sets itself up with GPU=1: several GB are fetched the
first time. A library built from libcuda.c stands in for the driver, and reports no card.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import standin

from helpers import gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def course():
    """A copy of what git knows here, set up for GPUs; its .venv stays from run to run."""
    course = ROOT / "build/gpu-stack"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (course / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, course / name)
    done = subprocess.run(["make", "setup", "GPU=1"], cwd=course, env=clean(os.environ),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return course


@pytest.fixture(scope="module")
def with_driver(tmp_path_factory):
    return clean(standin.environment(standin.driver(tmp_path_factory.mktemp("driver"))))


def clean(environment):
    return {name: value for name, value in environment.items()
            if not name.startswith(("VIRTUAL_ENV", "PYTHON", "MAKE", "GPU", "TORCH"))}


def run(course, code, environment):
    return subprocess.run([course / ".venv/bin/python", "-c", code], cwd=course / "notebooks",
                          env=environment, capture_output=True, text=True)


LOOK = """
import json, re
from helpers import devices
import mxnet as mx
has = mx.runtime.Features()
mapped = sorted({line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps")
                 if "/" in line})
print(json.dumps({"features": [n for n in ("CUDA", "CUDNN", "NCCL") if has.is_enabled(n)],
                  "gpus": mx.context.num_gpus(), "sum": float(mx.nd.ones(3).sum().asscalar()),
                  "devices": [str(d) for d in devices(2)], "mapped": mapped}))
"""


def test_mxnet_for_gpus_imports_and_every_library_is_from_its_wheel(course, with_driver):
    done = run(course, LOOK, with_driver)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["features"] == ["CUDA", "CUDNN", "NCCL"]
    assert (found["gpus"], found["sum"]) == (0, 3)
    assert found["devices"] == ["cpu(0)", "cpu(1)"]
    for library in gpu.LIBRARIES:
        name = Path(library).name
        places = [path for path in found["mapped"] if Path(path).name == name]
        assert places == [str(next(course.glob(f".venv/lib/python*/site-packages/nvidia/{library}"))
                              )], name


def test_what_mxnet_is_linked_against_is_all_in_the_list(course):
    """Read from the library itself, so that a forgotten one can't hide behind the system's."""
    (library,) = course.glob(".venv/lib/python*/site-packages/mxnet/libmxnet.so")
    if not shutil.which("readelf"):
        pytest.skip("no readelf to read a library's needs with: apt install binutils")
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line}
    cuda = {n for n in needed if n.startswith(("libcu", "libnv", "libnccl"))} - {"libcuda.so.1"}
    assert len(cuda) == 9
    assert cuda <= {Path(name).name for name in gpu.LIBRARIES}


def test_the_first_six_chapters_run_and_what_trains_in_them_twice(course, with_driver):
    chapters = [f"notebooks/{path.name}" for path in course.glob("notebooks/0[1-6]_*.ipynb")]
    assert len(chapters) == 6
    done = subprocess.run(["make", "test", f"ARGS={' '.join(sorted(chapters))}"], cwd=course,
                          env={**with_driver, "COURSE_TWICE": "training"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = sum(cell["cell_type"] == "code" for name in chapters
                for cell in json.loads((course / name).read_text())["cells"])
    assert f"{cells} passed" in done.stdout, done.stdout


def test_without_a_driver_import_and_doctor_say_so_in_a_sentence(course):
    if gpu.usable():
        pytest.skip("there is a GPU here, and so a driver")
    environment = clean(os.environ)
    done = run(course, "import helpers", environment)
    assert done.returncode == 0
    assert "no NVIDIA driver" in done.stderr and "make setup GPU=0" in done.stderr
    done = subprocess.run(["make", "doctor"], cwd=course, env=environment, capture_output=True,
                          text=True)
    assert "no NVIDIA driver: install one, or `make setup GPU=0`" in done.stdout, done.stdout


def test_the_choice_stays_until_another_is_made(course):
    done = subprocess.run(["make", "setup"], cwd=course, env=clean(os.environ),
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), "nothing to do, though there is no card"
