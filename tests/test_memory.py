"""What `helpers.memory` says, against blocks of known size."""

import os
import subprocess
import sys

import numpy as np
import pytest

from helpers.memory import allocated, peak, resident

MB = 10**6


def test_a_block_is_counted_until_it_is_freed():
    before = allocated()
    block = np.empty(50 * MB, "uint8")
    assert 49 * MB < allocated() - before < 51 * MB
    del block
    assert abs(allocated() - before) < MB


def printed(program, **variables):
    """What a process of its own prints: in ours, memory that other tests freed may serve again."""
    return subprocess.check_output([sys.executable, "-c", program], text=True,
                                   env=os.environ | variables)


# Large blocks come from glibc's heap, as `helpers` asks, or by mmap, as they do without.
@pytest.mark.parametrize("most", ["0", "65536"])
def test_a_block_is_counted_wherever_glibc_takes_it_from(most):
    program = """
import numpy as np
from helpers.memory import allocated
before = allocated()
block = np.empty(50_000_000, "uint8")
print(49e6 < allocated() - before < 51e6)
"""
    assert printed(program, GLIBC_TUNABLES=f"glibc.malloc.mmap_max={most}") == "True\n"


def test_what_is_touched_is_resident():
    program = """
import numpy as np
from helpers.memory import resident
before = resident()
block = np.empty(80_000_000, "uint8")
untouched = resident()
block[:] = 1
print(untouched - before < 10e6, 75e6 < resident() - untouched < 85e6)
"""
    assert printed(program) == "True True\n"


def test_the_peak_stays_and_is_not_the_parents():
    parent = np.ones(300 * MB, "uint8")
    program = """
import numpy as np
from helpers.memory import peak
before = peak()
block = np.ones(100_000_000, "uint8")
del block
print(before < 250e6, peak() - before > 90e6)
"""
    assert printed(program) == "True True\n"
    now = resident()  # before the peak is read: reading takes memory too
    assert peak() >= now > parent.nbytes
