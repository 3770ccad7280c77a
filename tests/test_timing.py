"""`Others` sees other programs' work, and not our own."""

import subprocess
import sys
import time

import psutil

from helpers.timing import Others


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_neighbour_is_seen():
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        with Others() as others:
            time.sleep(1)
    finally:
        neighbour.kill()
        neighbour.wait()
    assert 0.5 / psutil.cpu_count() < others.share <= 1


def test_our_own_work_is_not_counted():
    before = psutil.cpu_times()
    with Others() as others:
        spin(1)
    after = psutil.cpu_times()
    busy = sum(after) - sum(before) - (after.idle - before.idle)
    assert others.share < (busy - 0.5) / (sum(after) - sum(before))
