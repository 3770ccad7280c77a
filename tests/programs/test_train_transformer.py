"""notebooks/train_transformer.py: on 2 x 2 ranks, and resumed on others, as one process.

All meshes of up to eight ranks: tests/tools/test_train_transformer_hard.py.
"""

import json
from pathlib import Path

from helpers.cluster import torchrun

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

ROOT = Path(__file__).resolve().parents[2]
REFUSED = [  # options, and numbers that the reason has
    ("--data 3", ["3", "4"]),
    ("--tensor 4 --data 0", ["--data 0"]),
    ("--data 4 --steps 0", ["--steps 0"]),
    ("HEADS=6 --tensor 4", ["4", "6 heads"]),
    ("LAYERS=6 --pipeline 4", ["4", "6 layers"]),
    ("BATCH=20 --data 2 --pipeline 2", ["2", "4 micro", "20 examples"]),
    ("--tensor 4 --save FOLDER/nowhere/whole.pt", ["FOLDER/nowhere"]),
    ("--tensor 4 --resume FOLDER", ["FOLDER"]),
    ("--tensor 4 --save FOLDER", ["FOLDER"]),
    ("--tensor 4 --checkpoint FOLDER/other", ["FOLDER/other"]),
    ("READS2=FOLDER/nowhere --data 4", ["rank 2", "FOLDER/nowhere"]),  # one rank alone sees it
    ("READS2=FOLDER/other --data 4", ["rank 2", "FOLDER/other"]),
]
RUNS = [
    "--data 2 --tensor 2 --float64 --steps 2 --checkpoint FOLDER/two --save FOLDER/2.pt",
    "--data 2 --pipeline 2 --float64 --steps 3 --resume FOLDER/two --save FOLDER/3.pt",
    "--data 4 --float64 --steps 2 --resume FOLDER/two",
]
REFUSED_LATER = [  # once there is a checkpoint
    ("--data 4 --float64 --steps 1 --resume FOLDER/two", ["--steps 1", "2"]),
    ("--data 4 --steps 3 --resume FOLDER/two", ["float64", "float32"]),
    ("RATE=1 --data 4 --float64 --steps 3 --resume FOLDER/two", ["0.003", "1"]),
    ("LAYERS=2 --data 4 --float64 --steps 3 --resume FOLDER/two", ["4", "2"]),
    ("READS0=FOLDER/other READS1=FOLDER/other READS2=FOLDER/other READS3=FOLDER/other "
     "--data 4 --float64 --steps 3 --resume FOLDER/two", ["hash"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train_transformer")


@pytest.fixture(scope="module")
def said(folder):
    """[rank][run], a list of lines."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    (folder / "other").write_text(text[::-1], encoding="utf-8")  # with the same alphabet
    runs = [line.replace("FOLDER", str(folder)).split()
            for line in [options for options, _ in REFUSED] + RUNS
            + [options for options, _ in REFUSED_LATER]]
    runs += [["one process", 2, f"{folder}/one2.pt"], ["one process", 3, f"{folder}/one3.pt"]]
    printed = torchrun(ROOT / "tests/mesh_runs.py", 4, timeout=600, log=None,
                       arguments=[ROOT / "notebooks", json.dumps(runs)])
    return [[run.splitlines() for run in text.split("run\n")[1:]] for text in printed]


def test_as_one_process_and_resumed_on_another_mesh(folder, said):
    for steps in (2, 3):
        found = torch.load(folder / f"{steps}.pt", weights_only=True)
        expected = torch.load(folder / f"one{steps}.pt")
        assert {name: (type(w), w.shape, w.dtype, w.device) for name, w in found.items()} \
            == {name: (type(w), w.shape, w.dtype, w.device) for name, w in expected.items()}
        for name, weight in expected.items():
            assert (found[name] - weight).abs().max() < 1e-12, name


def test_rank_0_says_how_far_it_is(said):
    first = len(REFUSED)
    for run, steps in enumerate([["step 1", "step 2"], ["step 3"], ["no step to do"]], first):
        assert [line.partition(":")[0] for line in said[0][run]] == steps
        assert [len(said[rank][run]) for rank in range(1, 4)] == [0, 0, 0]


def test_what_does_not_fit_is_refused_on_all_ranks_with_the_numbers(folder, said):
    for lines in said:
        refused = lines[: len(REFUSED)] + lines[len(REFUSED) + len(RUNS) :]
        for run, (options, numbers) in zip(refused, REFUSED + REFUSED_LATER, strict=False):
            reason, status = run[-2:]
            for number in numbers:
                assert number.replace("FOLDER", str(folder)) in reason, options
            assert status == "status 2"
