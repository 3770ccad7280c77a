"""`Others` sees other programs' work, and not our own."""

import os
import signal
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
    # A shell starts it and ends, so that it is nobody's child.
    start = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    neighbour = int(subprocess.check_output(["sh", "-c", start]))
    try:
        time.sleep(0.3)
        with Others() as others:
            time.sleep(1)
    finally:
        os.kill(neighbour, signal.SIGKILL)
    assert 0.5 / psutil.cpu_count() < others.share <= 1


def test_our_own_work_is_not_counted():
    before = psutil.cpu_times()
    with Others() as others:
        spin(1)
    after = psutil.cpu_times()
    busy = sum(after) - sum(before) - (after.idle - before.idle)
    assert others.share < (busy - 0.5) / (sum(after) - sum(before))


def test_a_process_that_we_started_is_ours_while_it_runs_and_after():
    work = "import time\nwhile time.process_time() < {}: pass"
    before = psutil.cpu_times()
    with Others() as others:
        child = subprocess.Popen([sys.executable, "-c", work.format(10)])
        subprocess.run([sys.executable, "-c", work.format(0.7)], check=True)
    child.kill()
    child.wait()
    after = psutil.cpu_times()
    busy = sum(after) - sum(before) - (after.idle - before.idle)
    assert others.share < (busy - 1.0) / (sum(after) - sum(before))
