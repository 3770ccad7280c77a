"""notebooks/sharded_train.py: no call that a user would make is silently wrong.

It is right, which is held against one process, or it raises with the reason and the way out.
"""

import json
from pathlib import Path

from helpers.cluster import torchrun

import pytest

pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "notebooks/sharded_train.py"

RIGHT = [
    "called_inside", "cleared_before_the_step", "cleared_gradients", "clipping",
    "clipping_of_stages", "decay_groups", "error_in_forward", "evaluation", "frozen_later",
    "gradient_penalty", "group_added_later", "kept_graph", "made_anew", "named_parameters",
    "not_cleared", "optimizer_from_before", "optimizer_in_backward", "optimizer_state",
    "own_shards", "post_accumulate_hooks", "recomputed_activations", "set_to_zero",
    "type_changed", "unusual_modules", "whole_weights", "with_ddp"]

RAISES = {
    "copied_inside": "replaced or copied",
    "copied_or_pickled": "gather_full_params",
    "functional_call": "replaced or copied",
    "gradient_by_hand": "did not come by a backward pass",
    "gradients_asked_for": "not have been used in the graph",
    "hooks_from_before": "register them after wrapping",
    "initialised_after_wrapping": "initialise the module before",
    "optimizer_of_shards": "sharded already",
    "refused_modules": "max_norm|by DDP already",
    "replaced_data": "replaced or copied",
    "replaced_parameter": "replaced or copied",
    "second_derivatives": "create_graph",
    "shape_changed": "make the optimizer after",
    "sharded_by_torch": "sharded already",
    "sharded_child": "sharded already",
    "sparse_gradients": "sparse",
    "tensor_hooks": "register_post_accumulate_grad_hook",
    "torchs_clipping_of_stage_2": "single memory location",
    "unfinished_clipping": "not called",
    "unfinished_step": "not called",
    "whole_tensor_optimizers": "LBFGS|Adafactor|Muon",
    "whole_weights_by_load_state_dict": "load_full_params",
    "whole_weights_of_another_size": r"shape \(4,\), not \(5,\)",
    "whole_weights_that_lack_one": "Missing key",
}
ON_SEVERAL = {  # with one rank there is no other that could differ
    "another_order": "another order",
    "another_order_of_stage_2": "another order",
    "other_parameters": "modules differ",
    "state_of_whole_parameters": "of the whole parameter",
    "wrapped_after": "make the optimizer after",
}


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request):
    """What each rank of tests/fixtures/sharded_behaviours.py found."""
    lines = torchrun(ROOT / "tests/fixtures/sharded_behaviours.py", request.param,
                     arguments=[SCRIPT], timeout=300, log=None)[0]
    ranks = json.loads(lines.strip().splitlines()[-1])
    assert len(ranks) == request.param
    return ranks


def sayings(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", RIGHT)
def test_is_right(found, name):
    for rank in found:
        assert isinstance(rank[name], (int, float)), rank[name]
        assert rank[name] < 1e-12


@pytest.mark.parametrize("name", RAISES)
def test_raises(found, name):
    for rank in found:
        for said, part in zip(sayings(rank[name]), RAISES[name].split("|") * 3):
            assert said.startswith("raises: ") and part.replace("\\", "") in said, said


@pytest.mark.parametrize("name", ON_SEVERAL)
def test_raises_on_several_ranks(found, name):
    if len(found) == 1:
        pytest.skip("one rank")
    for rank in found:
        assert rank[name].startswith("raises: ") and ON_SEVERAL[name] in rank[name]


def test_nothing_else_was_asked(found):
    others = {"freed", "freed_optimizers", "names", "own_shards_in_a_larger_module",
              "rank_0s_shards", "sharded_already", "two_at_once"}
    assert set(found[0]) == {*RIGHT, *RAISES, *ON_SEVERAL, *others}


def test_a_module_that_is_sharded_already_is_refused_and_left_as_it_is(found):
    for said, gap in (rank["sharded_already"] for rank in found):
        assert "sharded already" in said and gap < 1e-12


def test_another_ranks_shards_are_refused_and_nothing_is_loaded(found):
    assert found[0]["rank_0s_shards"][0] == "nothing said"
    for rank in found[1:]:
        said, changed = rank["rank_0s_shards"]
        assert "load_full_params" in said and not changed
        assert "load_full_params" in rank["own_shards_in_a_larger_module"]


def test_parameters_keep_the_modules_names(found):
    assert all(rank["names"] is True for rank in found)


def test_what_is_dropped_is_freed(found):
    for rank in found:
        assert rank["freed"] == [True] * 3 and rank["freed_optimizers"] == [True] * 4


def test_two_optimizers_of_stage_2_are_told(found):
    assert all("another ShardedGradients" in rank["two_at_once"][0] for rank in found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_run_as_a_program_it_trains(stage):
    printed = torchrun(SCRIPT, 2, arguments=["--stage", stage, "--steps", "60"], timeout=120,
                       log=None)
    assert "step 60: loss" in printed[0]
    for text in printed:
        right = float(text.split(" % right")[0].split()[-1])
        assert right > 40, "ten kinds: 10 % by chance"
        assert ("weights kept: 134,661" in text) == (stage == 3), "half of them in stage 3"
