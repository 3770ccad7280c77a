"""notebooks/train_transformer.py on all meshes of 1, 2, 4 and 8 ranks, and as it is started.

What most people meet is in tests/programs/test_train_transformer.py.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from helpers.cluster import Failed, torchrun

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "notebooks/train_transformer.py"
MESHES = {  # data, tensor, pipeline; four heads and four layers
    1: ["111"],
    2: ["211", "121", "112"],
    4: ["411", "141", "114", "221", "212", "122"],
    8: ["811", "421", "412", "241", "222", "214", "142", "124"],
}
RESUMED = ["411", "122", "114", "141"]


def options(mesh, *more):
    data, tensor, pipeline = mesh
    return ["--data", data, "--tensor", tensor, "--pipeline", pipeline, "--float64", "--steps",
            "5", *more]


def apart(found, expected):
    found, expected = torch.load(found, weights_only=True), torch.load(expected)
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def test_every_mesh_ends_with_one_process_s_weights(tmp_path, capsys):
    """Also where it resumes what another mesh has saved."""
    table = {}
    for world, meshes in MESHES.items():
        runs = [options(mesh, "--save", f"{tmp_path}/{mesh}.pt") for mesh in meshes]
        names = list(meshes)
        if world == 1:
            runs.append(["one process", 5, f"{tmp_path}/one.pt"])
        if world == 4:
            saved = options("221", "--checkpoint", f"{tmp_path}/three")
            saved[saved.index("5")] = "3"
            runs.append(saved)
            for mesh in RESUMED:
                names.append(f"221 to {mesh}")
                runs.append(options(mesh, "--resume", f"{tmp_path}/three",
                                    "--save", f"{tmp_path}/{names[-1]}.pt"))
        torchrun(ROOT / "tests/mesh_runs.py", world, timeout=1800, log=None,
                 arguments=[ROOT / "notebooks", json.dumps(runs)])
        for name in names:
            table[name] = apart(f"{tmp_path}/{name}.pt", f"{tmp_path}/one.pt")
    with capsys.disabled():
        for name, difference in table.items():
            print(f"\n{name:12} {difference:.1e}", end="")
    assert max(table.values()) < 1e-12


def test_a_refusal_ends_all_processes_within_seconds():
    begin = time.monotonic()
    with pytest.raises(Failed, match=r"--data 3 .* is 3, but the number of processes is 2"):
        torchrun(PROGRAM, 2, arguments=["--data", 3], log=None)
    assert time.monotonic() - begin < 100  # and not the timeout


def test_alone_it_says_what_is_missing_and_where_it_looked(tmp_path):
    """And with a text beside it, it trains on that."""
    alone = tmp_path / "copied"
    alone.mkdir()
    for name in ["train_transformer.py", "transformer.py"]:
        shutil.copy(PROGRAM.with_name(name), alone)
    with pytest.raises(Failed) as failure:
        torchrun(alone / PROGRAM.name, 1, log=None)
    assert f"neither {alone}/LICENSE nor {tmp_path}/LICENSE" in str(failure.value)
    (alone / "LICENSE").write_text("to be or not to be: " * 30)
    (printed,) = torchrun(alone / PROGRAM.name, 1, arguments=["--steps", 20], log=None)
    losses = [float(line.split()[3].strip(",")) for line in printed.splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_help_and_a_start_without_torchrun():
    said = subprocess.run([sys.executable, PROGRAM, "--help"], capture_output=True, text=True)
    assert said.returncode == 0 and "--resume FOLDER" in said.stdout
    said = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert said.returncode == 2 and "torchrun --standalone" in said.stderr
