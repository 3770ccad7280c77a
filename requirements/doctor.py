"""Says what this machine can do, and what to do about what it can't, before set-up and after it.

    make doctor        (or, with any Python from 3.8 on: python3 requirements/doctor.py)

It changes nothing. Each line is found out by itself, so that one thing that is broken hides no
other, and what concerns the environment is asked of its own Python, in processes of their own.
Exit status 1 where the course can't run.
"""

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

GOOD, MISSING, BAD = "✓", "–", "✗"   # fine; can be done without; the course can't run
ROOT = Path(__file__).resolve().parents[1]
ANEW = "delete .venv, then `make setup`"
GIB = 2**30   # of memory
GB = 10**9    # of a disk, as in set-up's words

MXNET = """
import helpers, mxnet as mx, numpy
has = mx.runtime.Features()
parts = [n for n in ("CUDA", "CUDNN", "NCCL", "MKLDNN") if has.is_enabled(n)]
print(mx.__version__, "with", ", ".join(parts).replace("MKLDNN", "oneDNN") + "; NumPy",
      numpy.__version__)
"""
DATA = """
import json
from helpers.data import find_mnist
print(json.dumps(find_mnist()))
"""
WALLS = """
import sys
sys.path.insert(0, "notebooks/assignments")
from marking.process import find_bubblewrap
print(find_bubblewrap() is not None)
"""


class Failed(Exception):
    """A program ended badly; the last line of what it said."""


def run(*command):
    """What a program prints, in the repository's folder; raises Failed."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace",
                          timeout=120, cwd=str(ROOT))
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise Failed(said[-1])
    return done.stdout.strip()


def ask(code):
    """What the environment's Python prints for `code`."""
    return run(str(ROOT / ".venv/bin/python"), "-W", "ignore", "-c", code)


def setup(option):
    return run("sh", "requirements/setup.sh", option)


# --- Before set-up and after it: each returns (mark, what was found, what to do) ------------------


def state():
    found = setup("--state")
    if found == "ready":
        return GOOD, "up to date", ""
    if found == "foreign":
        return BAD, ".venv is not set-up's own, so it is left alone", "move it away or delete it"
    return MISSING, f".venv is {found}", "`make setup`, or any target that needs it, makes it"


def system():
    found = f"{platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return BAD, found, "the course needs Linux or a Mac; on Windows, use WSL2"
    if found == "Darwin arm64":
        return BAD, found, "MXNet 1.9.1 has no package for Apple silicon"
    return GOOD, found, ""


def libraries():
    for name in ("libgomp.so.1", "libquadmath.so.0") if sys.platform == "linux" else ():
        try:
            ctypes.CDLL(name)
        except OSError:
            return BAD, f"no {name}", ("install libgomp1 and libquadmath0 (Fedora: libgomp and "
                                       "libquadmath)")
    return GOOD, "found", ""


def gpus():
    # By its path: `import helpers` makes settings for MXNet.
    spec = importlib.util.spec_from_file_location("gpu", str(ROOT / "helpers/gpu.py"))
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    try:
        cards = gpu.cards()
    except gpu.NoDriver as error:
        return MISSING, str(error), "CPU cores stand in for GPUs"
    if not cards:
        return MISSING, "a driver, but no card", "CPU cores stand in for GPUs"
    found = "; ".join(f"{card}, {card.memory / GIB:.0f} GiB" for card in cards)
    if not all(card.usable for card in cards):
        return MISSING, found, ("MXNet 1.9.1 has machine code for capabilities 5.0 to 8.9 only; "
                                "the others, or CPU cores, are used instead")
    if setup("--find-lock") == "requirements/cpu.txt":
        return MISSING, found, "`make setup GPU=1` installs the build of MXNet that uses them"
    return GOOD, found, ""


def memory():
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = [int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")]
    return (GOOD, f"{free:.1f} GiB free", "") if free > 4 else (
        MISSING, f"{free:.1f} GiB free", "chapter 08 takes up to 4 GiB: close other programs")


def disk():
    free = shutil.disk_usage(str(ROOT)).free / GB
    found = f"{free:.1f} GB free"
    taken = 0.1   # notebooks are saved
    if setup("--state") != "ready":
        taken = 5.4 if "gpu" in setup("--find-lock") else 1.4
    if free < taken:
        return BAD, found, f"the course needs {taken} GB: free some"
    if free < taken + 6:
        return MISSING, found, "too little for PyTorch, if it isn't here yet: up to 6 GB"
    return GOOD, found, ""


# --- After set-up -------------------------------------------------------------------------------


def mxnet():
    try:
        return GOOD, ask(MXNET), ""
    except Failed as error:
        remedy = ANEW
        if "libcuda" in str(error):
            remedy = ("this is the build for GPUs, and there is no NVIDIA driver: install one, or "
                      "`make setup GPU=0` for the build for CPUs")
        return BAD, f"can't be imported: {error}", remedy


def torch():
    try:
        return GOOD, ask("from importlib import metadata; print(metadata.version('torch'))"), ""
    except Failed:
        return MISSING, "not installed", "chapters 13 to 20 need it: `make setup TORCH=1`"


def data():
    place, reasons = json.loads(ask(DATA))
    if os.getenv("COURSE_DATA") and place != "COURSE_DATA":
        return MISSING, "; ".join(reasons), (
            "name a folder with mnist/ and its four IDX files in it, or unset COURSE_DATA")
    if place:
        return GOOD, f"mnist from {place}", ""
    return MISSING, f"no MNIST: {'; '.join(reasons)}", (
        "chapters try to download it, or take scikit-learn's digits; COURSE_DATA names a folder")


def cores():
    count = ask("from helpers.engine import cores; print(cores())")
    return (GOOD, count, "") if int(count) > 1 else (
        MISSING, count, "all runs, but two simulated devices are no faster than one")


def grading():
    if ask(WALLS) == "True":
        return GOOD, "bubblewrap", ""
    return MISSING, "no bubblewrap that works", (
        "only for teachers: apt install bubblewrap keeps submissions from your files")


MACHINE = {"system": system, "libraries": libraries, "GPUs": gpus, "memory": memory, "disk": disk}
COURSE = {"MXNet": mxnet, "PyTorch": torch, "data": data, "cores": cores, "grading": grading}


def examine(name, check, fault=(BAD, "")):
    """Prints a line for one check, and another for what to do; returns its mark.

    `fault` is the mark and the remedy where the check itself fails.
    """
    try:
        mark, found, remedy = check()
    except Exception as error:   # whatever is broken here, the other lines are still wanted
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        mark, found, remedy = fault[0], f"{kind}{error}", fault[1]
    print(f"{mark} {name:<11} {found}" + (f"\n{'':14}→ {remedy}" if remedy else ""), flush=True)
    return mark


def main():
    sys.stdout.reconfigure(errors="replace")
    sys.dont_write_bytecode = True                # here
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"   # and in what is asked
    marks = [examine("set-up", state)]
    ready = marks[0] == GOOD
    marks += [examine(*each, fault=(MISSING, "")) for each in MACHINE.items()]
    if ready:
        marks += [examine(*each, fault=(BAD, ANEW)) for each in COURSE.items()]
    if BAD in marks:
        print("The course can't run here before what is marked ✗ is mended.")
    else:
        print("The course can run here." if ready else
              "The course is not set up yet: `make setup`, or `make lab` at once.")
    return int(BAD in marks)


if __name__ == "__main__":
    sys.exit(main())
