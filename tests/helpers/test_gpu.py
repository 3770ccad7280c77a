"""Cards are told apart by what their driver says, before MXNet could crash on one.

No GPU is needed: a library built from libcuda.c answers in the driver's place.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from helpers import gpu

ROOT = Path(__file__).resolve().parents[2]
# What the driver says, and whether MXNet 1.9.1 has machine code for it.
CARDS = {
    "NVIDIA A100|8|0|40536": True, "NVIDIA RTX 4090|8|9|24564": True, "V100|7|0|16384": True,
    "GeForce GTX 960|5|2|4096": True, "Tesla K80|3|7|11441": False, "old|4|9|1": False,
    "NVIDIA H200|9|0|143771": False, "NVIDIA B200|10|0|183359": False,
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return standin.driver(tmp_path_factory.mktemp("driver"))


def run(code, environment):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_cards_are_what_the_driver_says(driver):
    cards, usable = run("""
import json
from helpers import gpu
print(json.dumps([[[*card, str(card)] for card in gpu.cards()], gpu.usable()]))
""", standin.environment(driver, *CARDS))
    for said, card in zip(CARDS, cards, strict=True):
        name, major, minor, memory = said.split("|")
        assert card == [name, [int(major), int(minor)], int(memory) * 2**20,
                        f"{name}, capability {major}.{minor}"]
    assert usable == [number for number, good in enumerate(CARDS.values()) if good]


def test_as_a_program_it_succeeds_where_mxnet_can_use_a_card(driver):
    """So setup.sh asks, with any Python."""
    for cards, status in [(["A100|8|0|1"], 0), (["H200|9|0|1"], 1), ([], 1)]:
        done = subprocess.run([sys.executable, "-S", ROOT / "helpers/gpu.py"],
                              env=standin.environment(driver, *cards))
        assert done.returncode == status


def test_without_a_driver_that_is_said():
    try:
        gpu.cards()
    except gpu.NoDriver as error:
        assert "no NVIDIA driver" in str(error)
        assert gpu.usable() == []
    else:
        pytest.skip("there is a driver here")
