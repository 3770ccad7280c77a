"""What `helpers.memory` says, against blocks of known size."""

import os
import subprocess
import sys

import numpy as np
import pytest

from helpers.memory import allocated

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
