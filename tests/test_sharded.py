"""notebooks/sharded_train.py, which readers keep: equals one process."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.cluster import torchrun

import pytest

pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "notebooks/sharded_train.py"
CLOSE = {"fully_shard, float32": 1e-5, "fully_shard, bfloat16": 0.02}  # others: 1e-12
CASES = [f"{what} {stage}, {kind}" for kind in ("SGD", "Adam", "AdamW")
         for what, stages in (("stage", (1, 2, 3)), ("state", (1, 2))) for stage in stages]
CASES += [f"{what} 1, {kind}" for kind in ("NAdam", "Adagrad") for what in ("stage", "state")]
CASES += [f"from {one} to {other}, {kind}" for kind in ("SGD", "Adam", "NAdam")
          for one, other in ((0, 1), (1, 0), (1, 2), (2, 1))]
CASES += [f"accumulated, stage {stage}" for stage in (1, 2, 3)]
CASES += [*CLOSE, "ZeroRedundancyOptimizer"]
# torch itself loads NAdam's mu_product in another type than it made it in.
CLOSE |= {case: 1e-9 for case in CASES if case.startswith("from") and case.endswith("NAdam")}
SIZES = 100 * 100, 100, 100 * 100, 100, 600  # of memory()'s parameters


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def found(request):
    """What each rank of tests/fixtures/sharded_cases.py found, for 1 to 4 processes."""
    lines = torchrun(ROOT / "tests/fixtures/sharded_cases.py", request.param, arguments=[SCRIPT],
                     timeout=300, log=None)[0]
    ranks = json.loads(lines.strip().splitlines()[-1])
    assert len(ranks) == request.param
    return ranks


@pytest.mark.parametrize("case", CASES)
def test_trains_as_one_process_does(found, case):
    for rank in found:
        assert rank[case] < CLOSE.get(case, 1e-12)


def test_each_rank_holds_its_part(found):
    k = len(found)
    whole, padded = sum(SIZES), sum(-(-size // k) for size in SIZES)
    for rank in found:
        one, two, three = (rank["memory"][stage] for stage in "123")
        assert one["weights"] == two["weights"] == whole and three["weights"] == padded
        assert one["gradients before the step"] == whole
        for stage in (two, three):
            assert stage["gradients before the step"] <= padded
        for stage in (one, two, three):
            assert stage["state"] <= 2 * padded
    for what, times in (("gradients before the step", 1), ("state", 2)):
        assert sum(rank["memory"]["2"][what] for rank in found) >= times * whole


def test_all_ranks_begin_with_rank_0s_values(found):
    assert all(rank["begins with"] == [0.0] * 3 for rank in found)


def test_frozen_parameters_and_buffers_are_copied_from_rank_0(found):
    assert all(rank["copied"] and set(rank["copied"]) == {1.0} for rank in found)


def test_ranks_that_did_not_use_a_parameter_count_as_zero(found):
    assert all(rank["used on rank 0"] == [[pytest.approx(1 - 1 / len(found), abs=1e-15)] * 3]
               for rank in found)


def test_weights_of_one_shape_that_ranks_use_in_turn_are_kept_apart(found):
    k = len(found)
    expected = [pytest.approx(1 - 1 / k)] * 3 + [pytest.approx(9 - (k - 1) / k)] * 3
    assert all(rank["used in turn"] == expected for rank in found)


def test_a_closure_is_called_and_its_loss_returned(found):
    mean = (len(found) + 1) / 2
    assert all(rank["closure"] == [5.0, [-mean] * 3] for rank in found)


def test_fsdp_keeps_no_more_than_it_needs(found):
    for rank in found:
        assert rank["details"]["under way"] == 2 and rank["details"]["left"] == [0, 0]
        assert sorted(rank["details"]["types"]) == ["torch.bfloat16", "torch.float32"]
        assert rank["details"]["sent as"] == "torch.bfloat16"


def test_weights_saved_as_views_are_gathered_as_views(found):
    for rank in found:
        assert max(rank["details"]["views"]) < 1e-5
        assert rank["details"]["gathers"] == 7, "four reads; all but the complex one saved as notes"


def test_data_that_were_replaced_are_updated(found):
    assert all(rank["replaced"] == [[3.5] * 3] for rank in found)


def test_mistakes_are_named(found):
    for rank in found:
        said = rank["mistakes"]
        assert "not called" in said["unfinished"] and "torch.Size" in said["without gradients"]
        assert "was changed" in said["changed"] and "LSTM" in said["recurrent"]
        assert "optimizer_cls=LBFGS" in said["LBFGS"] and "Adafactor" in said["Adafactor"]
        assert "(3, 2)" in said["not contiguous"]
        assert "shape (2, 5), not (2, 3)" in said["another size"]
        assert "meta device" in said["meta"]
        assert "frozen" in said["unfrozen"] and "another" in said["two optimizers"]
        if len(found) > 1:
            assert "modules differ" in said["differ"]


def test_an_older_pytorch_is_refused_by_name():
    code = "import torch.distributed as d; del d.reduce_scatter_single; import sharded_train"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True,
                          text=True)
    assert done.returncode != 0 and "sharded_train.py needs 2.13 or newer" in done.stderr
