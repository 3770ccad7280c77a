"""`setup.sh` chooses the build of MXNet by the cards, which a stand-in for the driver tells."""

import shutil
import subprocess
from pathlib import Path

import pytest
import standin

ROOT = Path(__file__).resolve().parents[2]
A100, H200 = "NVIDIA A100|8|0|40536", "NVIDIA H200|9|0|143771"


@pytest.mark.parametrize("cards, chosen", [([A100], "gpu"), ([H200], "cpu"), ([H200, A100], "gpu"),
                                           ([], "cpu")])
def test_setup_chooses_the_build_by_the_cards(tmp_path, cards, chosen):
    """In a copy in which nothing is made yet."""
    driver = standin.driver(tmp_path)
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
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.many-devices").write_text(f"{other} none\n")
    assert lock(GPU="") == f"requirements/{other}.txt"
