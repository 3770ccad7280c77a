"""What a process's memory is, in bytes."""

import ctypes
import re
from pathlib import Path

import psutil


def allocated():
    """What this process has allocated and not freed, over all threads, by glibc's `mallinfo2`.

    It changes with each allocation, where `resident` changes with the pages that a system gives
    and takes. Raises RuntimeError without glibc 2.33 or newer.
    """
    check_glibc()
    fields = {"_fields_": [("values", ctypes.c_size_t * 10)]}
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = type("Counts", (ctypes.Structure,), fields)
    values = mallinfo2().values
    return values[4] + values[7]  # in blocks of their own, and in the heaps


def check_glibc():
    """Raise what `allocated` promises."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        raise RuntimeError("allocated() needs glibc 2.33 or newer, which has mallinfo2")


def resident():
    """What of this process is in memory now."""
    return psutil.Process().memory_info().rss


def peak():
    """What of this process was in memory at most, by Linux's VmHWM.

    Not `resource`'s ru_maxrss: on Linux it begins with what the process's parent held.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024
