"""What `make bench` and `make reproduce` share: the machine in words, memory, files."""

import json
import os
import platform
from pathlib import Path

from helpers.engine import cores

import psutil

GIB = 2**30


def machine():
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    memory = psutil.virtual_memory().total / GIB
    return f"{cores()} cores ({(names or [platform.processor()])[0]}), {memory:.0f} GiB"


def _cpuinfo():
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write(path, content, indent=1):
    """All of it or nothing, should we be stopped meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(content, indent=indent) + "\n")
    os.replace(path.with_suffix(".new"), path)


def check_memory(name, gib):
    free = psutil.virtual_memory().available / GIB
    print(f"{name}: takes up to {gib:g} GiB of memory, {free:.1f} are free", flush=True)
    if free < gib:
        raise SystemExit(f"{name}: too little memory; close other programs, or leave this row "
                         "out with --only")
