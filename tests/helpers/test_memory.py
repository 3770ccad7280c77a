"""What `helpers.memory` says, against blocks of known size."""

import os
import subprocess
import sys

import pytest


def printed(program, **variables):
    """What a process of its own prints: in ours, what other tests left is freed meanwhile."""
    return subprocess.check_output([sys.executable, "-c", program], text=True,
                                   env=os.environ | variables)


# Large blocks come from glibc's heap, as `helpers` asks, or by mmap, as they do without.
@pytest.mark.parametrize("most", ["0", "65536"])
def test_a_block_is_counted_until_it_is_freed(most):
    program = """
import numpy as np
from helpers.memory import allocated
before = allocated()
block = np.empty(50_000_000, "uint8")
print(49e6 < allocated() - before < 51e6)
del block
print(abs(allocated() - before) < 1e6)
"""
    assert printed(program, GLIBC_TUNABLES=f"glibc.malloc.mmap_max={most}") == "True\nTrue\n"
