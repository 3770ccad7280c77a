"""notebooks/sharded_train.py: no call that a user would make is silently wrong.

It is right, which is held against one process, or it raises with the reason and the way out; what
nothing can notice is in the first paragraph of its class. Many behaviours, each with a name, are
after PyTorch's own tests.
"""

import ast
import json
from itertools import cycle
from pathlib import Path

from helpers.cluster import torchrun

import pytest

pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "notebooks/sharded_train.py"

RIGHT = [
    "adversarial_examples", "averaged_weights", "called_inside", "channels_last",
    "cleared_before_the_step", "cleared_gradients", "clipped_by_value", "clipping",
    "clipping_of_stages", "closures", "compiled_after_wrapping", "compiled_before_wrapping",
    "complex_clipping", "complex_parameters",
    "counts_in_its_groups", "decay_groups", "distributed_checkpoint", "documented_buffers",
    "documented_gradient_of_stage_1", "documented_shard_elsewhere", "error_in_forward",
    "evaluation", "finished_after_each", "frozen_and_unfrozen_between_steps", "frozen_later",
    "frozen_later_in_stages", "gradient_penalty", "group_added_later", "integer_parameters",
    "kept_graph", "kept_graph_finished_once", "made_anew", "mixed_module", "named_parameters",
    "not_cleared", "optimizer_from_before", "optimizer_in_backward", "optimizer_state",
    "optimizers", "own_shards", "parameters_as_a_vector", "parametrized_before",
    "part_of_a_sequence", "post_accumulate_hooks", "pruned_after_in_stages",
    "read_elsewhere_in_stages", "recomputed_activations", "saved_to_a_file", "schedules",
    "set_to_constants", "set_to_zero", "small_parameters", "step_hooks", "symbolically_traced",
    "tied", "tied_after_wrapping", "transformer", "two_forwards_before_backward", "two_models",
    "type_changed", "type_changed_of_stage_1", "unfrozen_later", "unusual_modules",
    "whole_weights", "with_ddp"]

RAISES = {  # words of the reason or the way out; several where several were asked
    "a_closure_without_finish": "not called",
    "added_layer": "added or replaced",
    "averaged_fsdp": "gather_full_params",
    "backward_with_inputs": "without inputs=",
    "channels_last_before_stages": "contiguous_format",
    "cleared_before_finish": "clip or clear after",
    "clipped_before_finish": "clip or clear after",
    "compute_dtype_and_a_dict": "same dtype",
    "copied_inside": "replaced or copied",
    "copied_or_pickled": "gather_full_params",
    "copied_or_pickled_optimizers": "take its state_dict()",
    "edited_groups": "call add_param_group",
    "expanded_buffers": "single memory location",
    "finished_after_the_last": "gradients add up",
    "functional_call": "replaced or copied",
    "gradient_by_hand": "did not come by a backward pass",
    "gradients_asked_for": "not have been used in the graph",
    "hooks_from_before": "register them after wrapping",
    "hooks_of_state_dict": "not called here",
    "initialised_after_wrapping": "initialise the module before",
    "initialised_in_other_ways": "initialise the module before",
    "list_of_modules": "ModuleList",
    "loaded_by_assigning": "replaced or copied",
    "low_rank_layer_added": "added or replaced",
    "no_parameters": "no parameters",
    "no_values": "initialise the module before",
    "optimizer_of_shards": "sharded already",
    "optimizers_that_are_no_classes": "should be a class",
    "parametrized_after": "before FSDP wraps",
    "pytorchs_options":
        "process_group|kwarg|consolidate_state_dict|mesh|no_sync|"
        "clip_grad_norm_|unshard|set_requires_gradient_sync",
    "read_after_it_was_unfrozen": "in a forward, by its name",
    "read_by_parameters": "in a forward, by its name",
    "read_from_a_list": "in a forward, by its name",
    "read_in_a_hook_of_the_whole": "in a forward, by its name",
    "read_in_a_penalty": "in a forward, by its name",
    "read_in_another_method": "in a forward, by its name",
    "read_in_the_loss": "in a forward, by its name",
    "refused_modules": "max_norm|by DDP already",
    "replaced_data": "replaced or copied",
    "replaced_layer": "added or replaced",
    "replaced_parameter": "replaced or copied",
    "second_derivatives": "create_graph",
    "shape_changed": "make the optimizer after",
    "sharded_by_torch": "sharded already",
    "sharded_child": "sharded already",
    "sparse_gradients": "sparse",
    "sparse_gradients_of_others": "sparse",
    "state_of_another_model": "has shape (2, 2), not (2, 3)",
    "subclasses_of_whole_tensor_optimizers": "needs whole",
    "tensor_hooks": "register_post_accumulate_grad_hook",
    "the_modules_own_state_dict": "FSDP's load_state_dict",
    "tied_by_memory": "a.weight = b.weight",
    "torchs_clipping_of_stage_2": "single memory location",
    "traced": "requires grad",
    "type_changed_by_replacing": "replaced or copied",
    "type_changed_of_stage_2": "make the optimizer after",
    "unfinished_clipping": "not called",
    "unfinished_step": "not called",
    "unfrozen_later_in_stage_2": "frozen when this optimizer was made",
    "whole_tensor_optimizers": "LBFGS|Adafactor|Muon",
    "whole_weights_by_load_state_dict": "load_full_params",
    "whole_weights_of_another_size": "shape (4,), not (5,)",
    "whole_weights_that_lack_one": "Missing key",
    "wrong_parameters": "empty|iterable|iterable|is int|non-leaf|should be contiguous",
}
ON_SEVERAL = {  # with one rank there is no other that could differ
    "another_order": "another order",
    "another_order_of_stage_2": "another order",
    "other_parameters": "modules differ",
    "state_of_whole_parameters": "of the whole parameter",
    "wrapped_after": "make the optimizer after",
}
OTHERS = ["distributed_checkpoint_of_shards", "freed", "freed_optimizers", "names",  # each has
          "own_shards_in_a_larger_module", "rank_0s_shards", "sharded_already",  # its own test
          "two_at_once"]
DOCUMENTED = {  # what nothing can notice, and the class whose first paragraph says so
    "stay each rank's own after": "FSDP",
    "later buffers, such as BatchNorm's statistics, stay each rank's own": "ShardedOptimizer",
    "In a forward, by its name (`self.weight`), a parameter is read whole": "FSDP",
    "Read elsewhere, or by parameters(), it is this rank's shard": "FSDP",
    "what is written into it is lost": "FSDP",
    "`p.grad` is this rank's gradient only": "ShardedOptimizer",
    "use no GradScaler": "FSDP",
    "and use no GradScaler": "ShardedOptimizer",
    "Each rank saves and loads its own state_dict, the optimizer's, too": "FSDP",
    "through the same layers in the same order": "FSDP",
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
        for said, part in zip(sayings(rank[name]), cycle(RAISES[name].split("|"))):
            assert said.startswith("raises: ") and part in said, said


@pytest.mark.parametrize("name", ON_SEVERAL)
def test_raises_on_several_ranks(found, name):
    if len(found) == 1:
        pytest.skip("one rank")
    for rank in found:
        assert rank[name].startswith("raises: ") and ON_SEVERAL[name] in rank[name]


def test_nothing_else_was_asked(found):
    assert set(found[0]) == {*RIGHT, *RAISES, *ON_SEVERAL, *OTHERS}


def test_what_nothing_can_notice_is_in_the_first_paragraph():
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in DOCUMENTED.values():
            first = " ".join(ast.get_docstring(node).split("\n\n")[1].split())
            for words, name in DOCUMENTED.items():
                assert name != node.name or words in first, words


def test_a_module_that_is_sharded_already_is_refused_and_left_as_it_is(found):
    for said, gap in (rank["sharded_already"] for rank in found):
        assert "sharded already" in said and gap < 1e-12


def test_another_ranks_shards_are_refused_and_nothing_is_loaded(found):
    assert found[0]["rank_0s_shards"][0] == "nothing said"
    for rank in found[1:]:
        said, changed = rank["rank_0s_shards"]
        assert "load_full_params" in said and not changed
        assert "load_full_params" in rank["own_shards_in_a_larger_module"]


def test_rank_0s_shards_out_of_a_distributed_checkpoint_are_refused(found):
    for rank in found[1:]:
        assert "load_full_params" in rank["distributed_checkpoint_of_shards"]


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
