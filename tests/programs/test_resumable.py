"""notebooks/resumable_train.py: killed and started anew, it ends as if nothing had happened."""

import subprocess
import sys
from pathlib import Path

from helpers.cluster import torchrun

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

PROGRAM = Path(__file__).resolve().parents[2] / "notebooks/resumable_train.py"


def same(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_killed_and_started_anew_it_goes_on_bit_for_bit(tmp_path):
    source = torch.Generator().manual_seed(0)
    torch.save([torch.randn(512, 1, 28, 28, generator=source),
                torch.randint(10, (512,), generator=source)], tmp_path / "data.pt")
    printed = torchrun(PROGRAM, 2, arguments=[tmp_path, "killed", "unbroken", "--kill-at", 22],
                       max_restarts=1, log=None)  # a restart isn't killed again
    for text in printed:
        assert text.splitlines() == ['training "killed" begins at step 0; ranks: 2',
                                     'training "killed" begins at step 20; ranks: 2',
                                     'training "unbroken" begins at step 0; ranks: 2']
    weights = torch.load(tmp_path / "unbroken.weights")
    again = torch.load(tmp_path / "killed.weights")
    assert list(weights) == list(range(48)) and list(again) == list(range(20, 48))
    for step in range(20, 48):
        assert torch.equal(again[step], weights[step]), step
    assert same(torch.load(tmp_path / "killed.pt"), torch.load(tmp_path / "unbroken.pt"))


KILLED = """
import os, signal, sys, torch
from resumable_train import save

path = sys.argv[1]

def kill_at(moment, name, call):  # what changes the disk; what isn't synced is half written
    def called(*given):
        moment[0] -= 1
        if moment[0] < 0:
            if name == "fsync":
                os.ftruncate(given[0], os.fstat(given[0]).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        call(*given)
    return called

status = None
moment = 0
while status != 0:
    torch.save({"step": 20, "model": torch.ones(10_000)}, path)
    if os.fork() == 0:
        left = [moment]
        for name in ["fsync", "replace", "rename", "remove", "unlink"]:
            setattr(os, name, kill_at(left, name, getattr(os, name)))
        save({"step": 24, "model": torch.ones(10_000)}, path)
        os._exit(0)
    status = os.wait()[1]
    saved = torch.load(path)
    print(saved["step"], len(saved["model"]))
    moment += 1
"""


def test_killed_while_it_writes_it_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    """Before it is on the disk, before it is renamed, not at all: old, old, new, always whole."""
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "checkpoint.pt"],
                          cwd=PROGRAM.parent, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["20 10000", "20 10000", "24 10000"], done.stderr
