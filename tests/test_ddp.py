"""notebooks/ddp_train.py, which readers keep: it stands alone, and its DDP equals PyTorch's."""

import ast
import gzip
import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from helpers.cluster import Failed, torchrun

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "notebooks/ddp_train.py"
CLOSE = {"type float32": 1e-5, "type bfloat16": 0.02, "mixed types": 1e-5}  # others: 1e-12


def load():
    spec = spec_from_file_location("ddp_train", SCRIPT)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def found(request):
    """What each rank of tests/fixtures/ddp_cases.py found, for 1 to 4 processes."""
    lines = torchrun(ROOT / "tests/fixtures/ddp_cases.py", request.param, arguments=[SCRIPT],
                     log=None)[0]
    ranks = json.loads(lines.strip().splitlines()[-1])
    assert len(ranks) == request.param
    return ranks


@pytest.mark.parametrize("case", [
    "size 1e-06", "size 0.001", "size 0.004", "size 25", "type float32", "type bfloat16",
    "mixed types", "unused last", "used on one rank", "accumulated"])
def test_trains_as_pytorchs_own_does(found, case):
    for rank in found:
        assert rank[case]["apart"] < CLOSE.get(case, 1e-12)
        assert rank[case]["replicas equal"] and rank[case]["no gradient kept"]


@pytest.mark.parametrize("case, early", [
    ("size 1e-06", [7, 11]), ("size 0.001", [4, 8]), ("size 0.004", [1, 3]), ("size 25", [0, 1]),
    ("unused last", [0, 11]), ("accumulated", [4, 8])])
def test_a_complete_bucket_is_sent_before_the_backward_pass_has_ended(found, case, early):
    assert all(rank[case]["early"] == early for rank in found), "sent by then, of so many"


def test_all_ranks_begin_with_rank_0s_buffers(found):
    assert all(rank["buffers"] == [[5.0] * 16, [0, 2, 4, 6, 8, 10]] for rank in found)


def test_large_gradients_do_not_overflow_on_the_way(found):
    assert all(rank["large"] == 40_000 for rank in found), "float16 ends at 65,504"


def test_mistakes_are_named(found):
    for rank in found:
        assert "no_sync" in rank["twice"] and "no_sync" in rank["after"]
        assert "not called" in rank["forgotten"] and rank["nested"] == 0
        assert "bucket_size_mb=0" in rank["no size"]
        if len(found) > 1:
            assert "modules differ" in rank["differ"] and "modules differ" in rank["frozen on one"]


def test_stands_alone():
    imported = {name.split(".")[0] for node in ast.walk(ast.parse(SCRIPT.read_text()))
                for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                             else [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_trains_without_any_data():
    printed = torchrun(SCRIPT, 2, log=None)[0]
    shares = [float(line.split("%")[0].split()[-1]) for line in printed.strip().splitlines()]
    assert len(shares) == 3 and shares[-1] > 80, printed


def test_without_torchrun_it_says_what_to_do():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun --nproc-per-node=2" in done.stderr


def test_no_epochs_are_refused():
    with pytest.raises(Failed, match="--epochs 0: should be 1 or more"):
        torchrun(SCRIPT, 1, arguments=["--epochs", "0"], log=None)


def test_reads_mnists_own_files(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype="uint8")
    labels = np.array([3, 1, 4, 1, 5], dtype="uint8")
    for name, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        with gzip.open(tmp_path / f"train-{name}-ubyte.gz", "wb") as file:
            file.write(bytes(header) + array.tobytes())
    script = load()
    x, y = script.read_mnist(tmp_path, "train")
    assert x.shape == (5, 1, 28, 28) and np.allclose(x[:, 0].numpy(), images / 255 - 0.13)
    assert y.tolist() == labels.tolist()


def test_buckets_have_one_type_and_at_most_their_size():
    script = load()
    sizes = [(3, "float32"), (1, "float32"), (9, "float64"), (4, "float32"), (1, "float64")]
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=getattr(torch, t))) for n, t in sizes]
    place = {p: i for i, p in enumerate(parameters)}
    found = [[place[p] for p in bucket] for bucket in script.fill_buckets(parameters, 20)]
    assert found == [[0, 1], [2], [3], [4]], "16 bytes; 72 alone; 16 more don't fit; 8"


def test_a_rank_that_waits_learns_that_another_has_ended():
    script = """
import torch
from ranks import ranks

def part():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    if torch.distributed.get_rank() == 0:
        model(torch.ones(1, 3)).sum().backward()

if __name__ == "__main__":
    ranks(part, seconds=40)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "notebooks",
                          capture_output=True, text=True, timeout=120)
    assert "Connection" in done.stderr and "TimeoutError" not in done.stderr


def test_the_error_of_a_rank_is_raised_and_not_what_it_causes_on_another():
    script = """
import torch
from ranks import ranks

def part():
    if torch.distributed.get_rank() == 1:
        raise ConnectionError("Connection refused: the cause")
    torch.distributed.all_reduce(torch.ones(1))

if __name__ == "__main__":
    ranks(part, seconds=40)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "notebooks",
                          capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ConnectionError: Connection refused: the cause", done.stderr
