"""A driver that stands in for NVIDIA's: libcuda.c, compiled."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "libcuda.c"


def driver(folder):
    """The folder, in which there is now a libcuda.so.1, or a skip where nothing can compile it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler to build a stand-in for NVIDIA's driver: apt install gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o",
                    folder / "libcuda.so.1", SOURCE], check=True)
    return folder


def environment(folder, *cards, **more):
    """The variables for a process that finds the driver and these cards, "name|major|minor|MiB"."""
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
            "CARDS": ";".join(cards), **more}
