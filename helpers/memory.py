"""What a process has in memory, in bytes."""

import ctypes


def allocated():
    """What this process has allocated and not freed, over all threads, by glibc's `mallinfo2`.

    It changes with each allocation, where what is resident changes with the pages that a system
    gives and takes. Raises RuntimeError without glibc 2.33 or newer.
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
