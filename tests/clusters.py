"""What tests of clusters share: programs of a few lines, and whether any process is left."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers import cluster

ROOT = Path(__file__).resolve().parents[1]
# `import mxnet` takes seconds, four processes of a cluster do it on few cores, and other tests run
# beside them: so long may anything take. What has to be ended doesn't end by itself before that.
SLOW = 100
STAYS = 10 * SLOW


@pytest.fixture
def write(tmp_path):
    def write(text, name="worker.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def stub(monkeypatch):
    """Scheduler and servers that do nothing, but stay until they are ended or `seconds` pass."""
    return lambda seconds=0: monkeypatch.setattr(
        cluster, "SERVICE", f"import time; time.sleep({seconds})")


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def marked():
    """The processes that have our variable TOKEN, which whoever is started here inherits."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (process.environ().get("TOKEN") == str(os.getpid())
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


@pytest.fixture
def nobody_is_left(monkeypatch):
    monkeypatch.setenv("TOKEN", str(os.getpid()))
    yield
    assert marked() == [], "a test has left processes behind"


def until(true):
    end = time.monotonic() + SLOW
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()
