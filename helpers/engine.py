"""Settings that MXNet's engine reads while it loads, so they must be in place before.

Chapter 04's deeper notebook measures what each does to the speed of two simulated devices. A
variable that the user has set is never changed, and neither is a process in which MXNet is already
loaded, where it would be too late. `cores` counts what simulated devices can run on, and `is_on`
reads a variable of the course's own.
"""

import ctypes
import os
import platform
import sys
import warnings
from importlib import util

from helpers import gpu

# One simulated device is one CPU core, so no operator may spread over several. And an operator
# that needs scratch space takes it from a pool shared by all CPU devices: with MXNet's default
# of 4 spaces, devices wait for one another all the time; with 64 they wait much less.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MXNET_CPU_TEMP_COPY": "64",
}

# glibc returns large blocks to the system as soon as they are freed, and the next operator
# takes them again, page by page. These keep them: the number of glibc's option (malloc.h), the
# value, and the environment variable by which a user may have chosen otherwise.
ALLOCATOR = [
    (-4, 0, "MALLOC_MMAP_MAX_"),
    (-1, 2**31 - 1, "MALLOC_TRIM_THRESHOLD_"),
    (-2, 256 * 2**20, "MALLOC_TOP_PAD_"),
]


def prepare():
    """Make the settings, and load the CUDA libraries for a build of MXNet that needs them.

    Warns where MXNet was loaded first, with nothing changed, where there is no GPU driver for a
    build that can't be imported without, and in a kernel that isn't the course's, without MXNet.
    """
    if "mxnet" in sys.modules:
        if any(name not in os.environ for name in SETTINGS):
            warnings.warn(
                "mxnet was imported before helpers, too late for the settings with which "
                "simulated devices run side by side: the speed-ups of the course will not "
                "be seen. Restart the kernel and import helpers first.",
                stacklevel=3,
            )
        return
    if "mxnet.base" in sys.modules:  # which is left behind, with the library that it loaded
        warnings.warn(
            "mxnet was imported before helpers, and that failed. Restart the kernel and import "
            "helpers first, which makes the settings that MXNet needs here.",
            stacklevel=3,
        )
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    _keep_memory()
    if util.find_spec("mxnet") is None:
        warnings.warn(
            f"This is not the course's kernel: {sys.executable}, Python "
            f"{platform.python_version()}, has no MXNet. `make lab` opens the course in its own.",
            stacklevel=3,
        )
        return
    if gpu.is_cuda_build():
        try:
            gpu.preload()
        except gpu.NoDriver as error:
            warnings.warn(
                f"{error}, and the MXNet that is installed is the build for GPUs, which can't be "
                "imported without: install a driver, or the build for CPUs by `make setup GPU=0`.",
                stacklevel=3,
            )


def _keep_memory():
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is None or "GLIBC_TUNABLES" in os.environ:
        return
    for option, value, variable in ALLOCATOR:
        if variable not in os.environ:
            mallopt(option, value)


def cores():
    """CPU cores that this process may use, at least 1, as joblib counts them.

    By affinity, by the quota of its cgroup, of which a part of a core counts as one, and by the
    variable LOKY_MAX_CPU_COUNT.
    """
    import joblib  # here: it imports NumPy, which reads the settings above once

    return joblib.cpu_count()


def is_on(variable):
    """Whether an environment variable of the course is 1; not if it is 0, empty or not set.

    Raises ValueError where it is anything else.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}={value}: must be 1 or 0, or not be set")
    return value == "1"
