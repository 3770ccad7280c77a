"""Chapter 06's script of one cell: a copy of it, as a file of its own, trains on k devices."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = (ROOT / "notebooks/train_lenet.py").read_text()
# What a reader changes, and seeds so that each run here is the same.
DEVICES = "k = 2  # how many devices\n"
SEEDS = "import numpy\nnumpy.random.seed(0)\nmx.random.seed(0)\n"
NETWORK = "net = lenet()\n"
STEP = "        trainer.step(len(x))\n"
TEST_OUTPUTS = """        outputs = [net(x_shard) for x_shard in x_shards]
        metric.update(y_shards, outputs)
"""
# The last test accuracy once more, by NumPy.
BY_NUMPY = """
scores = net(mx.nd.array(data.test_images, ctx=devices[0])).asnumpy()
print(f"by NumPy {(scores.argmax(axis=1) == data.test_labels).mean():.3f}")
"""


def changed(script, old, new):
    assert script.count(old) == 1, old
    return script.replace(old, new)


def run(script, folder):
    """The accuracies that it prints, `{(k, epoch, which): share}`, in a process of its own.

    Under "by NumPy" the share of test images that the trained network has right.
    """
    copied = folder / "mine.py"
    copied.write_text(changed(script, NETWORK, SEEDS + NETWORK) + BY_NUMPY)
    environment = os.environ | {"COURSE_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("COURSE_DATA", None)  # the small digits are enough
    done = subprocess.run([sys.executable, copied.name], cwd=folder, env=environment, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = re.compile(r"^k = (\d), epoch (\d): (training|test) accuracy (\d\.\d+)$", re.M)
    shares = {(int(k), int(epoch), which): float(share)
              for k, epoch, which, share in line.findall(done.stdout)}
    shares["by NumPy"] = float(re.search(r"^by NumPy (.*)$", done.stdout, re.M)[1])
    return shares


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_copy_trains_on_k_devices(tmp_path, k):
    shares = run(changed(SCRIPT, DEVICES, f"k = {k}\n"), tmp_path)
    assert list(shares) == [(k, 1, "training"), (k, 1, "test"), (k, 2, "training"), (k, 2, "test"),
                            "by NumPy"]
    assert shares[k, 2, "test"] == shares["by NumPy"] > 0.5


@pytest.mark.parametrize("old, new", [
    ("    metric = mx.metric.Accuracy()  # NEW: test images\n", ""),
    ("test_dataset = ArrayDataset(data.test_images, data.test_labels)", "test_dataset = dataset"),
    (TEST_OUTPUTS, TEST_OUTPUTS.replace("y_shards, outputs", "y_shards[:1], outputs[:1]")),
], ids=["the same metric", "training images", "the first shard"])
def test_one_that_counts_wrongly_is_noticed(tmp_path, old, new):
    shares = run(changed(SCRIPT, old, new), tmp_path)
    assert shares[2, 2, "test"] != shares["by NumPy"]


def test_its_step_is_the_chapters_loop():
    """Which the chapter holds to plain gradient descent, a smaller last batch included."""
    chapter = (ROOT / "notebooks/src/06_lenet_with_trainer.py").read_text()
    first = "x_shards = gluon.utils.split_and_load(x, devices"
    last = "metric.update(y_shards, outputs)\n"
    found = []
    for text in (SCRIPT, chapter):
        begin = text.rindex("\n", 0, text.index(first)) + 1
        found.append(textwrap.dedent(text[begin:text.index(last) + len(last)]))
    assert found[0] == found[1] and "trainer.step(len(x))" in found[0]


def test_one_that_takes_no_step_is_noticed(tmp_path):
    shares = run(changed(SCRIPT, STEP, ""), tmp_path)
    assert shares[2, 2, "test"] < 0.3
