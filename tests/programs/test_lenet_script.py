"""notebooks/train_lenet.py, copied and changed as a reader does it, trains as a plain loop does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / "notebooks/train_lenet.py").read_text()
# Of 160 images the last batch has 32, which three devices can't share evenly; it is kept, to see
# that its step is the mean of its own images. Few steps, since float32 keeps two trainings together
# for a while only.
CHANGES = [("limit=13_000", "limit=160"), ('last_batch="discard"', 'last_batch="keep"'),
           ("    net = lenet()\n", "    seed()\n    net = lenet()\n"),
           ("def main(k):\n", """
import json
import numpy


def seed():
    mx.random.seed(0)
    numpy.random.seed(0)


def main(k):
"""), ("    main(k=2)\n", "    net = main(k=3)\n")]
# The same steps on one device, without Trainer and metric; how far the weights are apart, as a
# share of the largest; and the share of test images that the script's network has right.
PLAINLY = """
data = helpers.load_data("mnist", limit=160)
loader = DataLoader(ArrayDataset(data.train_images, data.train_labels), 64, shuffle=True)
seed()
alone = lenet()
alone.initialize(mx.init.Xavier(), ctx=mx.cpu(0))
for epoch in [1, 2]:
    for x, y in loader:
        with autograd.record():
            loss = cross_entropy(alone(x), y).mean()
        loss.backward()
        for p in alone.collect_params().values():
            p.data()[:] -= 0.3 * p.grad()
apart = []
for p, expected in zip(net.collect_params().values(), alone.collect_params().values()):
    expected = expected.data().asnumpy()
    for found in p.list_data():
        apart.append(float(abs(found.asnumpy() - expected).max() / abs(expected).max()))
scores = net(mx.nd.array(data.test_images, ctx=p.list_ctx()[0])).asnumpy()
right = float((scores.argmax(axis=1) == data.test_labels).mean())
print(json.dumps([max(apart), right]))
"""


def test_a_copy_on_three_devices_takes_the_steps_of_a_plain_loop_and_counts_right(tmp_path):
    script = SCRIPT
    for old, new in CHANGES:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (tmp_path / "mine.py").write_text(script + PLAINLY)
    environment = os.environ | {"COURSE_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("COURSE_DATA", None)  # the small digits are enough
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    apart, right = json.loads(last)
    shares = re.findall(r"^k = 3, epoch (\d): (training|test) accuracy (\d\.\d+)$",
                        "\n".join(printed), re.MULTILINE)
    assert [(epoch, which) for epoch, which, _ in shares] == [
        ("1", "training"), ("1", "test"), ("2", "training"), ("2", "test")]
    assert apart < 1e-3
    assert shares[-1][2] == f"{right:.3f}"
