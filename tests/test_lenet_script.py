"""Chapter 06's script of one cell: a copy of it, as a file of its own, trains on k devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = (ROOT / "notebooks/train_lenet.py").read_text()
# What a reader changes, and seeds so that each run here is the same.
DEVICES = "k = 2  # how many devices\n"
SEEDS = "import numpy\nnumpy.random.seed(0)\nmx.random.seed(0)\n"
NETWORK = "net = lenet()\n"
STEP = "        trainer.step(len(x))\n"


def changed(script, old, new):
    assert script.count(old) == 1, old
    return script.replace(old, new)


def run(script, folder):
    """The accuracies that it prints, `{(k, epoch, which): share}`, in a process of its own."""
    copied = folder / "mine.py"
    copied.write_text(changed(script, NETWORK, SEEDS + NETWORK))
    environment = os.environ | {"COURSE_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("COURSE_DATA", None)  # the small digits are enough
    done = subprocess.run([sys.executable, copied.name], cwd=folder, env=environment, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = re.compile(r"^k = (\d), epoch (\d): (training|test) accuracy (\d\.\d+)$", re.M)
    return {(int(k), int(epoch), which): float(share)
            for k, epoch, which, share in line.findall(done.stdout)}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_copy_trains_on_k_devices(tmp_path, k):
    shares = run(changed(SCRIPT, DEVICES, f"k = {k}\n"), tmp_path)
    assert list(shares) == [(k, 1, "training"), (k, 1, "test"), (k, 2, "training"), (k, 2, "test")]
    assert shares[k, 2, "test"] > 0.5


def test_one_that_takes_no_step_is_noticed(tmp_path):
    shares = run(changed(SCRIPT, STEP, ""), tmp_path)
    assert shares[2, 2, "test"] < 0.3
