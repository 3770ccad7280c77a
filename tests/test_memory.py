"""What `helpers.memory` says, against blocks of known size."""

import subprocess
import sys

import numpy as np
import psutil

from helpers.memory import allocated, peak, resident

MB = 10**6


def test_a_block_is_counted_until_it_is_freed():
    before = allocated()
    block = np.empty(50 * MB, "uint8")
    assert 49 * MB < allocated() - before < 51 * MB
    del block
    assert abs(allocated() - before) < MB


def test_what_is_touched_is_resident():
    before = resident()
    block = np.empty(80 * MB, "uint8")
    untouched = resident()
    block[:] = 1
    assert resident() - untouched > 70 * MB > untouched - before
    assert abs(resident() - psutil.Process().memory_info().rss) < 5 * MB


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
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said == "True True\n"
    assert peak() >= resident() > parent.nbytes
