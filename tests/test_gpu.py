"""Cards are told apart by what their driver says, before MXNet could crash on one.

No GPU is needed: a library built from fixtures/libcuda.c answers in the driver's place.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from helpers import gpu

ROOT = Path(__file__).resolve().parents[1]
A100, RTX, GTX = "NVIDIA A100|8|0|40536", "NVIDIA RTX 4090|8|9|24564", "GeForce GTX 960|5|2|4096"
H200, B200, K80 = "NVIDIA H200|9|0|143771", "NVIDIA B200|10|0|183359", "Tesla K80|3|7|11441"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return standin.driver(tmp_path_factory.mktemp("driver"))


def run(code, environment):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LIST = """
import json
from helpers import gpu
print(json.dumps([[*card, str(card), card.usable] for card in gpu.cards()]))
"""


def test_cards_are_what_the_driver_says(driver):
    found = run(LIST, standin.environment(driver, A100, H200))
    assert found == [
        ["NVIDIA A100", [8, 0], 40536 * 2**20, "NVIDIA A100, capability 8.0", True],
        ["NVIDIA H200", [9, 0], 143771 * 2**20, "NVIDIA H200, capability 9.0", False]]


def test_a_driver_without_a_card_has_none(driver):
    assert run(LIST, standin.environment(driver)) == []


@pytest.mark.parametrize("cards, usable", [
    ([A100], [0]), ([GTX, RTX], [0, 1]), ([H200], []), ([B200, K80], []), ([H200, A100], [1]),
    (["V100|7|0|16384", "Jetson|7|2|8192"], [0, 1]), (["old|4|9|1"], [])])
def test_which_cards_mxnet_has_code_for(driver, cards, usable):
    code = "import json\nfrom helpers import gpu\nprint(json.dumps(gpu.usable()))"
    assert run(code, standin.environment(driver, *cards)) == usable
    done = subprocess.run([sys.executable, "-S", ROOT / "helpers/gpu.py"],
                          env=standin.environment(driver, *cards))
    assert done.returncode == (0 if usable else 1), "what setup.sh asks"


def test_without_a_driver_that_is_said():
    try:
        gpu.cards()
    except gpu.NoDriver as error:
        assert "no NVIDIA driver" in str(error)
        assert gpu.usable() == []
    else:
        pytest.skip("there is a driver here")


# MXNet's own count is put in place of a GPU build's; which cards there are, the stand-in says.
CHOOSE = """
import json
from helpers import devices
import mxnet as mx
mx.context.num_gpus = lambda: SEEN
print(json.dumps([str(d) for d in devices(K)]))
"""


@pytest.mark.parametrize("cards, k, chosen, left_out", [
    ([A100, RTX], 2, ["gpu(0)", "gpu(1)"], []),
    ([H200, A100], 1, ["gpu(1)"], ["gpu(0)"]),
    ([H200, A100], 2, ["cpu(0)", "cpu(1)"], ["gpu(0)"]),
    ([H200, H200], None, ["cpu(0)", "cpu(1)"], ["gpu(0)", "gpu(1)"])])
def test_devices_leaves_out_a_card_that_mxnet_has_no_code_for(driver, cards, k, chosen, left_out):
    code = CHOOSE.replace("SEEN", str(len(cards))).replace("K", repr(k))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=standin.environment(driver, *cards, COURSE_SIMULATE=""))
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    assert json.loads(found) == chosen
    for name in left_out:
        assert any(line.startswith(f"{name} is left out: MXNet 1.9.1 has no machine code for "
                                   "NVIDIA H200, capability 9.0") for line in said), said
    assert len(said) == len(left_out) + 1


@pytest.mark.parametrize("cards, chosen", [([A100], "gpu"), ([H200], "cpu"), ([H200, A100], "gpu"),
                                           ([], "cpu")])
def test_setup_chooses_the_build_by_the_cards(driver, tmp_path, cards, chosen):
    """In a copy in which nothing is made yet."""
    for name in ("requirements/setup.sh", "helpers/gpu.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for lock in ("cpu", "gpu"):
        (tmp_path / f"requirements/{lock}.txt").write_text(lock)

    def lock(**more):
        done = subprocess.run(["sh", tmp_path / "requirements/setup.sh", "--find-lock"],
                              env=standin.environment(driver, *cards, **more),
                              capture_output=True, text=True)
        return done.stdout.strip() or done.stderr.strip()

    assert lock(GPU="") == f"requirements/{chosen}.txt"
    assert lock(GPU="0") == "requirements/cpu.txt"
    assert lock(GPU="1") == "requirements/gpu.txt"
    assert lock(GPU="yes").startswith("setup: GPU=yes: must be 1")
    # Once made, it stays.
    other = {"cpu": "gpu", "gpu": "cpu"}[chosen]
    sum_ = subprocess.run(["cksum"], stdin=open(tmp_path / f"requirements/{other}.txt"),
                          capture_output=True, text=True).stdout.strip()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.many-devices").write_text(f"{tmp_path.resolve()} {sum_}\n")
    assert lock(GPU="") == f"requirements/{other}.txt"
