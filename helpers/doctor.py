"""What this machine can do, in a table, and what to do about what it can't.

    python -m helpers.doctor        (or: make doctor)

Works with any Python and any broken environment: each line is found out by itself, and MXNet is
imported by a process of its own. Exit status 1 where the course can't run.
"""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from helpers import engine, gpu

GOOD, MISSING, BAD = "✓", "–", "✗"   # fine; can be done without; the course can't run
ROOT = Path(__file__).resolve().parents[1]
LOOK = """
import helpers, mxnet as mx
has = mx.runtime.Features()
parts = [n for n in ("CUDA", "CUDNN", "NCCL", "MKLDNN") if has.is_enabled(n)]
print(mx.__version__, "with", ", ".join(parts).replace("MKLDNN", "oneDNN"))
"""


def python():
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] == (3, 11):
        return GOOD, found, ""
    return BAD, found, "must be 3.11: `make setup` finds or fetches one; then use .venv/bin/python"


def numpy():
    found = metadata.version("numpy")
    if tuple(map(int, found.split(".")[:2])) < (1, 24):
        return GOOD, found, ""
    return BAD, found, "MXNet 1.9.1 needs one below 1.24: `make setup`"


def mxnet():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOOK], capture_output=True,
                          text=True, timeout=120, cwd=ROOT)
    if done.returncode == 0:
        return GOOD, done.stdout.strip(), ""
    why = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    remedy = "`make setup`"
    if gpu.is_cuda_build() and "libcuda" in why:
        remedy = ("this is the build for GPUs, and there is no NVIDIA driver: install one, or "
                  "`make setup GPU=0` for the build for CPUs")
    return BAD, f"can't be imported: {why}", remedy


def gpus():
    try:
        cards = gpu.cards()
    except gpu.NoDriver as error:
        return MISSING, str(error), "CPU cores stand in for GPUs"
    if not cards:
        return MISSING, "a driver, but no card", "CPU cores stand in for GPUs"
    found = "; ".join(f"{card}, {card.memory / 2**30:.0f} GiB" for card in cards)
    if not all(card.usable for card in cards):
        return MISSING, found, ("MXNet 1.9.1 has machine code for capabilities 5.0 to 8.9 only; "
                                "the others, or CPU cores, are used instead")
    if not gpu.is_cuda_build():
        return MISSING, found, "`make setup GPU=1` installs the build of MXNet that uses them"
    return GOOD, found, ""


def driver():
    tool = shutil.which("nvidia-smi")
    if not tool:
        return MISSING, "no nvidia-smi", ""
    done = subprocess.run([tool, "--query-gpu=driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True, timeout=30)
    return (GOOD if done.returncode == 0 else MISSING), " ".join(done.stdout.split()) or "?", ""


def cores():
    count = engine.cores()
    return (GOOD, f"{count}", "") if count > 1 else (
        MISSING, "1", "all runs, but two simulated devices are no faster than one")


def memory():
    import psutil

    free = psutil.virtual_memory().available / 2**30
    return (GOOD, f"{free:.1f} GiB free", "") if free > 4 else (
        MISSING, f"{free:.1f} GiB free", "chapters 08 to 10 take up to 4 GiB: close other programs")


def disk():
    free = shutil.disk_usage(ROOT).free / 2**30
    return (GOOD, f"{free:.0f} GiB free", "") if free > 2 else (
        MISSING, f"{free:.1f} GiB free", "the environment takes 1 GiB, with PyTorch up to 6 more")


def data():
    os.environ["COURSE_OFFLINE"] = "1"
    from helpers.data import DataUnavailable, load_data

    found = []
    for name in ("mnist", "fashion_mnist"):
        try:
            found.append(f"{name} from {load_data(name, fallback=False).source}")
        except DataUnavailable:
            continue
    if found:
        return GOOD, "; ".join(found), ""
    return MISSING, "neither MNIST nor Fashion-MNIST", (
        "chapters try to download them, or take scikit-learn's digits; COURSE_DATA names a folder")


def torch():
    return GOOD, metadata.version("torch"), ""


def lab():
    return GOOD, metadata.version("jupyterlab"), ""


def grading():
    found = f"nbgrader {metadata.version('nbgrader')}"
    bwrap = shutil.which("bwrap")
    works = bwrap and subprocess.run([bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"],
                                     capture_output=True).returncode == 0
    return (GOOD, f"{found}, bubblewrap", "") if works else (
        MISSING, f"{found}, no bubblewrap that works",
        "only for teachers: apt install bubblewrap keeps submissions from your files")


CHECKS = {"Python": python, "NumPy": numpy, "MXNet": mxnet, "JupyterLab": lab, "GPUs": gpus,
          "driver": driver, "cores": cores, "memory": memory, "disk": disk, "data": data,
          "PyTorch": torch, "grading": grading}  # fmt: skip
WITHOUT = {"PyTorch": (MISSING, "not installed", "chapter 12 needs it: `make setup TORCH=1`")}


def examine():
    """Yields (name, mark, what was found, what to do) for each check."""
    for name, check in CHECKS.items():
        try:
            yield name, *check()
        except metadata.PackageNotFoundError:
            yield name, *WITHOUT.get(name, (BAD, "not installed", "`make setup`"))
        except Exception as error:  # whatever is broken here, the other lines are still wanted
            yield name, BAD, f"{type(error).__name__}: {error}", "`make setup`"


def main():
    worst = GOOD
    for name, mark, found, remedy in examine():
        print(f"{mark} {name:<11} {found}" + (f"\n{'':14}→ {remedy}" if remedy else ""), flush=True)
        worst = BAD if BAD in (mark, worst) else worst
    print("The course can't run here before what is marked ✗ is mended." if worst == BAD else
          "The course can run here.")
    return int(worst == BAD)


if __name__ == "__main__":
    sys.exit(main())
