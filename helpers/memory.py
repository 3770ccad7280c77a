"""What a process has in memory, in bytes."""

import ctypes


def allocated():
    """What this process has allocated and not freed, over all threads, by glibc's `mallinfo2`.

    It changes with each allocation, where what is resident changes with the pages that a system
    gives and takes. Raises RuntimeError without glibc 2.33 or newer.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        raise RuntimeError("allocated() needs glibc 2.33 or newer, which has mallinfo2")
    fields = {"_fields_": [("values", ctypes.c_size_t * 10)]}
    mallinfo2.restype = type("Counts", (ctypes.Structure,), fields)
    values = mallinfo2().values
    return values[4] + values[7]  # in blocks of their own, and in the heaps
