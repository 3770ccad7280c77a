"""Says what this machine can do, and what to do about what it can't, before set-up and after it.

    make doctor        (or, with any Python from 3.8 on: python3 requirements/doctor.py)

It changes nothing. Each line is found out by itself, so that one thing that is broken hides no
other, and what concerns the environment is asked of its own Python, in processes of their own.
Exit status 1 where the course can't run.
"""

import ctypes
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

GOOD, MISSING, BAD = "✓", "–", "✗"   # fine; can be done without; the course can't run
ROOT = Path(__file__).resolve().parents[1]
ANEW = "delete .venv, then `make setup`"
GIB = 2**30   # of memory
GB = 10**9    # of a disk, as in set-up's words

VERSIONS = """
import json, platform
from importlib import metadata
found = {"Python": platform.python_version()}
for name in ("numpy", "jupyterlab", "nbgrader", "torch", "mxnet-cu112"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
MXNET = """
import helpers, mxnet as mx
has = mx.runtime.Features()
parts = [n for n in ("CUDA", "CUDNN", "NCCL", "MKLDNN") if has.is_enabled(n)]
print(mx.__version__, "with", ", ".join(parts).replace("MKLDNN", "oneDNN"))
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


def find(what):
    """What set-up would use: a path, or None."""
    try:
        return setup(f"--find-{what}")
    except Failed:
        return None


# --- What set-up needs --------------------------------------------------------------------------


def environment():
    state, _, why = setup("--state").partition(" ")
    if state == "ready":
        return GOOD, "up to date", ""
    if state == "foreign":
        return BAD, *why.split(": ", 1)
    remedy = "`make setup`, or any target that needs it, makes it"
    return MISSING, why or "not made yet", remedy


def folder():
    if ":" in str(ROOT):
        return BAD, f"the path {ROOT} has a colon", "move the course to a folder without one"
    if not os.access(str(ROOT), os.W_OK):
        return BAD, f"you may not write to {ROOT}", "change its owner or permissions, or move it"
    return GOOD, str(ROOT), ""


def base():
    python = find("python")
    if python:
        return GOOD, f"3.11, {python}", ""
    if os.getenv("PYTHON"):
        return BAD, f"PYTHON={os.environ['PYTHON']} is no 3.11 that runs", "name one, or unset it"
    if find("uv") or find("maker"):
        return MISSING, "no 3.11", "uv tries to fetch one, from GitHub; or install it"
    return BAD, "no 3.11", "install it, or uv, which fetches Python"


def uv():
    found, maker = find("uv"), find("maker")
    if found or maker:
        return GOOD, found or f"none; {maker} fetches it", ""
    return BAD, "none, and no Python with a venv module to fetch it", (
        "install uv, or python3.11 with that module (Debian and Ubuntu: python3-venv)")


def libraries():
    for name in ("libgomp.so.1", "libquadmath.so.0") if sys.platform == "linux" else ():
        try:
            ctypes.CDLL(name)
        except OSError:
            return BAD, f"no {name}", ("install libgomp1 and libquadmath0 (Fedora: libgomp and "
                                       "libquadmath)")
    return GOOD, "found", ""


def room():
    """GB that the environment takes."""
    return int(setup("--find-room")) / 1000


def uv_cache():
    home = os.getenv("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.getenv("UV_CACHE_DIR") or os.path.join(home, "uv")).absolute()


def cache():
    place = uv_cache()
    there = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(str(there)).free / GB
    if not os.access(str(there), os.W_OK):
        return BAD, f"you may not write to {place}", "let UV_CACHE_DIR name another folder"
    if free < room():
        return BAD, f"{free:.1f} GB free for {place}", f"set-up needs {room():g}: free some"
    return GOOD, str(place), ""


def default_index():
    """The address that uv, or the pip that would fetch it, takes by itself: its help names it."""
    uv, maker = find("uv"), find("maker")
    tool = [uv] if uv else [maker, "-m"] if maker else None
    try:
        said = run(*tool, "pip", "install", "--help") if tool else ""
    except Failed:
        said = ""
    address = re.search(r"https?://[^\s<>()]+/simple", said)
    return address and address[0]


def index():
    place = os.getenv("UV_DEFAULT_INDEX") or os.getenv("UV_INDEX_URL") or default_index()
    if not place:
        return MISSING, "not known which", "set-up needs one that answers"
    parts = urllib.parse.urlsplit(place)
    host = parts.netloc.rpartition("@")[2]   # what is before it may be a password
    try:
        urllib.request.urlopen(parts._replace(netloc=host).geturl(), timeout=10).close()
    except urllib.error.HTTPError:
        pass   # it may want the password; that it answers is enough
    except (OSError, ValueError) as error:
        found = f"{host}: {getattr(error, 'reason', error)}"
        if find("uv") and uv_cache().exists():
            return MISSING, found, "set-up needs it, unless uv's cache has every package"
        return BAD, found, "set-up needs it: check the network"
    return GOOD, f"{host} answers", ""


# --- What is set up -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def versions():
    return json.loads(ask(VERSIONS))


def version(name):
    if name not in versions():
        raise Failed("not installed")
    return versions()[name]


def python():
    return GOOD, version("Python"), ""


def numpy():
    found = version("numpy")
    if tuple(map(int, found.split(".")[:2])) < (1, 24):
        return GOOD, found, ""
    return BAD, found, f"MXNet 1.9.1 needs one below 1.24: {ANEW}"


def mxnet():
    try:
        return GOOD, ask(MXNET), ""
    except Failed as error:
        remedy = ANEW
        if "libcuda" in str(error) and "mxnet-cu112" in versions():
            remedy = ("this is the build for GPUs, and there is no NVIDIA driver: install one, or "
                      "`make setup GPU=0` for the build for CPUs")
        return BAD, f"can't be imported: {error}", remedy


def lab():
    return GOOD, version("jupyterlab"), ""


def torch():
    if "torch" in versions():
        return GOOD, version("torch"), ""
    return MISSING, "not installed", (
        "chapters 13 to 16 need it: `make setup TORCH=1`")


def grading():
    found = f"nbgrader {version('nbgrader')}"
    if ask(WALLS) == "True":
        return GOOD, f"{found}, bubblewrap", ""
    return MISSING, f"{found}, no bubblewrap that works", (
        "only for teachers: apt install bubblewrap keeps submissions from your files")


def data():
    place, reasons = json.loads(ask(DATA))
    if place:
        told = reasons if os.getenv("COURSE_DATA") else []   # whoever set it expects it to be used
        return GOOD, "; ".join([*told, f"mnist from {place}"]), ""
    return MISSING, f"no MNIST: {'; '.join(reasons)}", (
        "chapters try to download it, or take scikit-learn's digits; COURSE_DATA names a folder")


def cores():
    count = ask("from helpers.engine import cores; print(cores())")
    return (GOOD, count, "") if int(count) > 1 else (
        MISSING, count, "all runs, but two simulated devices are no faster than one")


# --- The machine --------------------------------------------------------------------------------


def system():
    found = f"{platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return BAD, found, "the course needs Linux or a Mac; on Windows, use WSL2"
    if found == "Darwin arm64":
        return BAD, found, "MXNet 1.9.1 has no package for Apple silicon"
    return GOOD, found, ""


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


def driver():
    if not shutil.which("nvidia-smi"):
        return MISSING, "no nvidia-smi", ""
    found = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return GOOD, " ".join(found.split()), ""


def memory():
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = [int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")]
    return (GOOD, f"{free:.1f} GiB free", "") if free > 4 else (
        MISSING, f"{free:.1f} GiB free", "chapters 08 to 11 take up to 4 GiB: close other programs")


def disk():
    free = shutil.disk_usage(str(ROOT)).free / GB
    found = f"{free:.1f} GB free"
    ready = setup("--state") == "ready"
    taken = 0 if ready else room()
    if free < taken:
        return BAD, found, f"the environment takes {taken:g} GB: free some"
    if free < 0.1:
        return BAD, found, "notebooks could not be saved: free some"
    if free - taken < 6 and not (ready and "torch" in versions()):
        return MISSING, found, "PyTorch would take up to 6 GB"
    return GOOD, found, ""


def course_data():
    given = os.environ["COURSE_DATA"]
    place = Path(os.path.expanduser(given))
    remedy = "name a folder with mnist/ and its four IDX files in it, or unset COURSE_DATA"
    if not place.is_dir():
        return MISSING, f"{given} is no folder", remedy
    if not any((place / name / f"train-images-idx3-ubyte{end}").is_file()
               for name in ("mnist", ".") for end in ("", ".gz")):
        return MISSING, f"{given} holds no MNIST", remedy
    return GOOD, given, ""


SETUP = {"folder": folder, "Python": base, "uv": uv, "libraries": libraries, "uv's cache": cache,
         "index": index}
COURSE = {"Python": python, "NumPy": numpy, "MXNet": mxnet, "JupyterLab": lab, "PyTorch": torch,
          "grading": grading, "data": data, "cores": cores}
MACHINE = {"GPUs": gpus, "driver": driver, "memory": memory, "disk": disk}


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
    marks = [examine("system", system), examine("set-up", environment)]
    ready = marks[-1] == GOOD
    for each in (COURSE if ready else SETUP).items():
        marks.append(examine(*each, fault=(BAD, ANEW if ready else "")))
    marks += [examine(*each, fault=(MISSING, "")) for each in MACHINE.items()]
    if os.getenv("COURSE_DATA"):
        marks += [examine("COURSE_DATA", course_data)]
    if BAD in marks:
        print("The course can't run here before what is marked ✗ is mended.")
    else:
        print("The course can run here." if ready else
              "The course is not set up yet: `make setup`, or `make lab` at once.")
    return int(BAD in marks)


if __name__ == "__main__":
    sys.exit(main())
