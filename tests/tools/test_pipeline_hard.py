"""notebooks/pipeline.py in hard cases: own lists, odd modules, dtypes, large messages, errors.

What most people meet is in tests/programs/test_pipeline.py.
"""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from pipeline import gpipe, one_f_one_b, train_step  # noqa: E402
from ranks import ranks  # noqa: E402
from torch import nn  # noqa: E402


def linear_net(layers=3, width=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).double()


def batch(n=12, width=4):
    source = torch.Generator().manual_seed(1)
    return torch.randn(2, n, width, generator=source).double()


def only_there(x, y):
    """x on the first rank, y on the last."""
    rank = dist.get_rank()
    return x if rank == 0 else None, y if rank == dist.get_world_size() - 1 else None


def apart_from_whole(layers, steps, micro_batches):
    """How far the gradients of this rank's layer are from those of all layers in one process."""
    rank = dist.get_rank()
    x, y = batch()
    whole = nn.Sequential(*layers)
    parameters = list(layers[rank].parameters())
    F.mse_loss(whole(x), y).backward()
    due = [p.grad.clone() if p.grad is not None else None for p in parameters]
    whole.zero_grad()
    train_step(layers[rank], steps, *only_there(x, y), F.mse_loss, micro_batches,
               (len(x) // micro_batches, x.shape[1]))
    assert [p.grad is None for p in parameters] == [grad is None for grad in due]
    return max([0.0] + [(p.grad - grad).abs().max().item()
                        for p, grad in zip(parameters, due) if grad is not None])


# --- own lists ------------------------------------------------------------------------------------

ONE_AT_A_TIME = [(kind, i) for i in range(4) for kind in ("forward", "backward")]
LAST_ONE_FIRST = ([("forward", i) for i in range(4)]
                  + [("backward", i) for i in reversed(range(4))])
FOR_MORE_STAGES = one_f_one_b(8, 4)
LISTS = {"one at a time": [ONE_AT_A_TIME] * 3, "the last one first": [LAST_ONE_FIRST] * 3,
         "those of more stages": FOR_MORE_STAGES[:3], "the first one's": [one_f_one_b(3, 4)[0]] * 3,
         "tuples": [tuple(steps) for steps in gpipe(3, 4)]}


def with_list(lists):
    return apart_from_whole(list(linear_net()), lists[dist.get_rank()], 4)


@pytest.mark.parametrize("name", LISTS)
def test_own_lists_that_go_through_give_the_same_gradients(name):
    assert max(ranks(with_list, LISTS[name], world=3)) < 1e-12


def mixed():
    steps = (gpipe, one_f_one_b)[dist.get_rank()](2, 4)[dist.get_rank()]
    try:
        train_step(nn.Linear(4, 4), steps, *only_there(*batch()), F.mse_loss, 4, (3, 4))
    except ValueError as error:
        return str(error)


def test_lists_of_two_schedules_that_would_wait_for_each_other_are_refused():
    for said in ranks(mixed):
        assert "ranks [0, 1] would wait for each other" in said


# --- odd modules ----------------------------------------------------------------------------------


class Turned(nn.Module):
    """Its output isn't contiguous, nor is the gradient of its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 1).double())

    def forward(self, x):
        return (self.scale * x.t()).t()


class Cut(nn.Module):
    """Its output needs no gradient: nothing before it gets one."""

    def forward(self, x):
        return x.detach()


def with_odd_modules(name):
    layers = {
        "not contiguous": lambda: [linear_net(1)[0], Turned(), linear_net(1)[0]],
        "passes on what it gets": lambda: [linear_net(1)[0], nn.Identity(), linear_net(1)[0]],
        "no parameters in the first": lambda: [nn.Tanh(), linear_net(1)[0], nn.Tanh()],
    }[name]()
    return apart_from_whole(layers, one_f_one_b(3, 4)[dist.get_rank()], 4)


@pytest.mark.parametrize("name", ["not contiguous", "passes on what it gets",
                                  "no parameters in the first"])
def test_odd_modules(name):
    assert max(ranks(with_odd_modules, name, world=3)) < 1e-12


def with_a_cut():
    """Before the cut zeros come back, where one process leaves no gradient at all."""
    layers = [linear_net(1)[0], Cut(), linear_net(1)[0]]
    rank = dist.get_rank()
    train_step(layers[rank], gpipe(3, 2)[rank], *only_there(*batch()), F.mse_loss, 2, (6, 4))
    return [p.grad.abs().sum().item() for p in layers[rank].parameters()]


def test_before_a_detached_output_gradients_are_zero():
    first, _, last = ranks(with_a_cut, world=3)
    assert first == [0, 0] and min(last) > 0


def in_another_dtype(way):
    """Dtypes that each stage gets and makes; under autocast outputs are bfloat16."""
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    rank = dist.get_rank()
    layers = linear_net().to(dtype)
    x, y = (each.to(dtype) for each in batch())
    seen = []
    layers[rank].register_forward_hook(lambda module, inputs, outputs: seen.append(
        (inputs[0].dtype, outputs.dtype)))
    with torch.autocast("cpu", enabled=way == "autocast"):
        train_step(layers[rank], one_f_one_b(3, 4)[rank], *only_there(x, y), F.mse_loss, 4, (3, 4))
    return set(seen), {p.grad.dtype for p in layers[rank].parameters()}


@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
def test_what_is_sent_has_the_parameters_dtype(way):
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    output = torch.bfloat16 if way == "autocast" else dtype
    for seen, grads in ranks(in_another_dtype, way, world=3):
        assert seen == {(dtype, output)} and grads == {dtype}


# --- large messages, PyTorch's schedules on four ranks --------------------------------------------


def large():
    """4 MB a message, more than the sockets between two processes hold."""
    rank = dist.get_rank()
    layer = nn.Linear(8, 8)
    x, y = torch.ones(2, 4 * 2**17, 8)
    for schedule in (gpipe, one_f_one_b):
        train_step(layer, schedule(3, 4)[rank], *only_there(x, y), F.mse_loss, 4, (2**17, 8))
    return layer.weight.grad.isfinite().all().item()


def test_large_messages_pass():
    assert ranks(large, world=3) == [True] * 3


def beside_pytorchs():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank = dist.get_rank()
    x, y = batch(16)
    differences = []
    for ours, theirs in [(gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)]:
        mine, other = linear_net(4)[rank], linear_net(4)[rank]
        stage = PipelineStage(other, rank, 4, torch.device("cpu"))
        given = {0: ((x,), {}), 3: ((), {"target": y})}.get(rank, ((), {}))
        theirs(stage, 8, loss_fn=F.mse_loss).step(*given[0], **given[1])
        train_step(mine, ours(4, 8)[rank], *only_there(x, y), F.mse_loss, 8, (2, 4))
        differences.append((mine.weight.grad - other.weight.grad).abs().max().item())
    return max(differences)


def test_gradients_are_those_of_pytorchs_schedules_on_four_ranks():
    assert max(ranks(beside_pytorchs, world=4)) < 1e-12


# --- refused, or an error -------------------------------------------------------------------------


def without_gradients():
    with torch.set_grad_enabled(dist.get_rank() == 0):
        try:
            train_step(nn.Linear(4, 4), gpipe(2, 2)[dist.get_rank()], *only_there(*batch()),
                       F.mse_loss, 2, (6, 4))
        except ValueError as error:
            return str(error)


def test_without_gradients_on_one_rank_it_is_refused_on_all():
    for said in ranks(without_gradients):
        assert "rank 1: it needs gradients" in said


def in_ddp():
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    layer = nn.Linear(4, 4).double()
    if rank == 1:
        layer = nn.Sequential(nn.parallel.DistributedDataParallel(layer, process_group=alone))
    try:
        train_step(layer, gpipe(2, 2)[rank], *only_there(*batch()), F.mse_loss, 2, (6, 4))
    except ValueError as error:
        return str(error)


def test_a_stage_in_ddp_is_refused_on_all_ranks():
    for said in ranks(in_ddp):
        assert "rank 1: a stage wrapped in DistributedDataParallel" in said


def replicas_of_a_pipeline():
    """Two replicas of two stages: bare stages, then gradients summed over the replicas."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, stage = rank // 2, rank % 2
    x, y = batch()
    whole, layer = linear_net(2), linear_net(2)[stage]
    F.mse_loss(whole(x), y).backward()
    x, y = x.chunk(2)[replica], y.chunk(2)[replica]
    train_step(layer, one_f_one_b(2, 3)[stage], x, y, F.mse_loss, 3, (2, 4), pipelines[replica])
    dist.all_reduce(layer.weight.grad, group=replicas[stage])
    return (layer.weight.grad / 2 - whole[stage].weight.grad).abs().max().item()


def test_replicas_add_up_their_gradients_after_the_step():
    assert max(ranks(replicas_of_a_pipeline, world=4)) < 1e-12


def outside_of_the_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return train_step(nn.Linear(4, 4).double(), gpipe(1, 2)[0], *batch(), F.mse_loss, 2, None,
                          group).item()
    try:
        train_step(nn.Linear(4, 4), gpipe(1, 2)[0], *batch(), F.mse_loss, 2, None, group)
    except ValueError as error:
        return str(error)


def test_who_isnt_in_the_group_is_told():
    loss, said = ranks(outside_of_the_group)
    assert loss > 0 and "not in the group" in said


def other_output():
    rank = dist.get_rank()
    layer = [nn.Linear(4, 5), nn.Linear(4, 4)][rank]
    train_step(layer, gpipe(2, 2)[rank], *only_there(*batch().float()), F.mse_loss, 2, (6, 4))


def rounded_output():
    rank = dist.get_rank()
    layer = [nn.Tanh(), nn.Linear(4, 4)][rank]
    train_step(layer, gpipe(2, 2)[rank], *only_there(*batch()), F.mse_loss, 2, (6, 4))


def error_in_a_module():
    rank = dist.get_rank()
    layer = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 4)][rank]
    train_step(layer, one_f_one_b(3, 4)[rank], *only_there(*batch().float()), F.mse_loss, 4, (3, 4))


# Last: an error ends all processes, and a call after it starts new ones.
def test_an_output_of_another_shape_is_an_error_with_both_shapes():
    with pytest.raises(ValueError, match=r"stage 0 has the shape \(6, 5\).*shape=\(6, 4\)"):
        ranks(other_output, seconds=20)


def test_an_output_that_would_be_rounded_is_an_error():
    with pytest.raises(ValueError, match="stage 0 is torch.float64, and would be rounded"):
        ranks(rounded_output, seconds=20)


def test_an_error_in_one_ranks_module_ends_all():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ranks(error_in_a_module, world=3, seconds=20)
