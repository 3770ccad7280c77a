"""notebooks/pipeline.py: as one process, holding no more than it must, or all ranks say why not.

What is rare, and PyTorch's schedules on four ranks: tests/tools/test_pipeline_hard.py. (Chapter 19
compares with its 1F1B, too.)
"""

import time
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from pipeline import gpipe, one_f_one_b, train_step  # noqa: E402
from ranks import ranks  # noqa: E402
from torch import nn  # noqa: E402
from transformer import Transformer  # noqa: E402

SCHEDULES = [gpipe, one_f_one_b]
TOKENS, WIDTH, VOCABULARY = 5, 8, 11
CUTS = {1: [5], 2: [1, 4], 3: [3, 1, 1]}  # layers of each stage


class Embedding(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.token, self.place = net.token, net.place

    def forward(self, tokens):
        return self.token(tokens) + self.place(torch.arange(tokens.shape[1]))


def make_net():
    torch.manual_seed(0)
    return Transformer(VOCABULARY, WIDTH, heads=2, layers=3, tokens=TOKENS).double()


def cut(net, stages, rank):
    """This rank's stage, which shares the network's parameters."""
    layers = [Embedding(net), *net.blocks, nn.Sequential(net.norm, net.output)]
    return nn.Sequential(*torch.utils.data.Subset(layers, range(
        sum(CUTS[stages][:rank]), sum(CUTS[stages][:rank + 1]))))


def mean_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(step=0, n=12):
    source = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (n, TOKENS + 1), generator=source)
    return text[:, :-1], text[:, 1:]


def step_of(stage, schedule, micro_batches, x, y):
    """train_step as it is meant: x on the first rank, y on the last."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    steps = schedule(stages, micro_batches)[rank]
    return train_step(stage, steps, x if rank == 0 else None, y if rank == stages - 1 else None,
                      mean_loss, micro_batches, (len(x) // micro_batches, TOKENS, WIDTH))


def apart(found, truth):
    """The largest difference of the gradients that `found` has; all of a stage have one."""
    truth = dict(truth.named_parameters())
    found = {name: p for name, p in found.named_parameters() if p.grad is not None}
    return max((p.grad - truth[name].grad).abs().max().item() for name, p in found.items())


# --- as one process -------------------------------------------------------------------------------


def gradients_added_to_those_that_stood_there():
    """For each schedule and number of micro-batches: how far from one process, and the losses."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    x, y = batch()
    truth = make_net()
    for p in truth.parameters():
        p.grad = torch.full_like(p, 0.5)
    due = mean_loss(truth(x), y)
    due.backward()
    results = []
    for schedule in SCHEDULES:
        for micro_batches in [1, 3, 12]:
            net = make_net()
            stage = cut(net, stages, rank)
            for p in stage.parameters():
                p.grad = torch.full_like(p, 0.5)
            loss = step_of(stage, schedule, micro_batches, x, y)
            results.append((apart(net, truth), due.item(), loss))
    return results


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_gradients_and_loss_are_one_processs_whatever_stood_there(stages):
    found = ranks(gradients_added_to_those_that_stood_there, world=stages)
    for rank, results in enumerate(found):
        for difference, due, loss in results:
            assert difference < 1e-12
            if rank == stages - 1:
                assert loss.shape == () and not loss.requires_grad
                assert abs(loss.item() - due) < 1e-12
            else:
                assert loss is None


def two_trained_steps(freeze):
    """How far weights are from one process's after two updates; frozen gradients are None."""
    truth, net = make_net(), make_net()
    for each in (truth, net):
        if freeze:  # the first stage whole, a part of the second
            for module in (each.token, each.place, each.blocks[0], each.blocks[1],
                           each.blocks[2].mlp):
                module.requires_grad_(False)
    stage = cut(net, 3, dist.get_rank())
    for step in range(2):
        x, y = batch(step)
        step_of(stage, one_f_one_b, 4, x, y)
        mean_loss(truth(x), y).backward()
        for p in [*truth.parameters(), *stage.parameters()]:
            if p.grad is not None:  # an update with momentum: gradients stay, and add up
                p.data -= 0.1 * p.grad
    of_stage = {id(p) for p in stage.parameters()}
    differences = [0.0]
    for p, due in zip(net.parameters(), truth.parameters()):
        if id(p) in of_stage:
            assert (p.grad is None) == (due.grad is None)
            differences.append((p - due).abs().max().item())
    return max(differences)


def test_two_steps_in_a_row_train_as_one_process_with_frozen_layers_too():
    assert max(ranks(two_trained_steps, False, world=3)) < 1e-12
    assert max(ranks(two_trained_steps, True, world=3)) < 1e-12


def two_pipelines_at_a_time():
    """Ranks 0 and 2 are one pipeline, 1 is another, of one stage, with a batch of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    number, rank = dist.get_rank() % 2, dist.get_rank() // 2
    stages = 2 - number
    x, y = batch(number)
    truth, net = make_net(), make_net()
    mean_loss(truth(x), y).backward()
    train_step(cut(net, stages, rank), one_f_one_b(stages, 6)[rank], x if rank == 0 else None,
               y if rank == stages - 1 else None, mean_loss, 6, (2, TOKENS, WIDTH), groups[number])
    return apart(net, truth)


def test_a_rank_is_its_place_in_the_group():
    assert max(ranks(two_pipelines_at_a_time, world=3)) < 1e-12


# --- the lists ------------------------------------------------------------------------------------


def simulated(lists, backward=2):
    """When the last pass ends, and how many micro-batches each stage holds at most.

    A forward pass takes 1, a message nothing; a pass begins when its stage is free and its message
    is there.
    """
    last = len(lists) - 1
    ended, free, at = {}, [0] * len(lists), [0] * len(lists)
    held, most = [0] * len(lists), [0] * len(lists)
    while any(place < len(steps) for place, steps in zip(at, lists)):
        before = list(at)
        for stage, steps in enumerate(lists):
            if at[stage] == len(steps):
                continue
            kind, i = steps[at[stage]]
            peer = stage - 1 if kind == "forward" else stage + 1
            if 0 <= peer <= last and (kind, i, peer) not in ended:
                continue
            begin = max(free[stage], ended.get((kind, i, peer), 0))
            free[stage] = begin + (1 if kind == "forward" else backward)
            ended[kind, i, stage] = free[stage]
            held[stage] += 1 if kind == "forward" else -1
            most[stage] = max(most[stage], held[stage])
            at[stage] += 1
        assert at != before, "the stages wait for each other"
    return max(free), most


def test_lists_have_each_pass_once_and_end_after_m_plus_stages_minus_1_passes():
    for stages in range(1, 7):
        for m in range(1, 13):
            for schedule in SCHEDULES:
                lists = schedule(stages, m)
                once = [("forward", i) for i in range(m)] + [("backward", i) for i in range(m)]
                assert len(lists) == stages
                assert [sorted(steps) for steps in lists] == [sorted(once)] * stages
                length, most = simulated(lists)
                assert length == (m + stages - 1) * (1 + 2)
                if schedule is gpipe:
                    assert most == [m] * stages
                else:
                    assert most == [min(m, stages - stage) for stage in range(stages)]
    assert gpipe(2, 2)[0] == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]


def test_numbers_of_stages_and_micro_batches_are_whole_and_from_1_on():
    for schedule in SCHEDULES:
        for wrong, error in [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError),
                             (True, TypeError), (None, TypeError)]:
            with pytest.raises(error, match=f"stages={wrong!r}:"):
                schedule(wrong, 2)
            with pytest.raises(error, match=f"micro_batches={wrong!r}:"):
                schedule(2, wrong)


# --- what is held ---------------------------------------------------------------------------------


def count_alive(memories, expected):
    """How many still exist, when gloo's threads have let go of what they sent; 5 s at most."""
    end = time.monotonic() + 5
    while sum(memory() is not None for memory in memories) > expected and time.monotonic() < end:
        time.sleep(0.01)
    return sum(memory() is not None for memory in memories)


def outputs_held(schedule):
    """At most, with the one that a forward pass has just made; and after the call.

    On the last stage inputs: there a loss comes of an output at once.
    """
    rank, stages, m = dist.get_rank(), dist.get_world_size(), 6
    expected = m if schedule is gpipe else min(m, stages - rank)
    memories, alive = [], []

    def look(module, inputs, outputs):
        held = inputs[0] if rank == stages - 1 else outputs
        memories.append(weakref.ref(held.untyped_storage()))
        alive.append(count_alive(memories, expected))

    stage = cut(make_net(), stages, rank)
    stage.register_forward_hook(look)
    step_of(stage, schedule, m, *batch())
    return max(alive) - expected, count_alive(memories, 0), len(memories)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_output_is_held_until_its_backward_pass_has_run_and_no_longer(schedule):
    assert ranks(outputs_held, schedule, world=3) == [(0, 0, 6)] * 3


# --- what would hang, or be wrong in silence, is refused on all ranks -----------------------------


def swapped(steps, first, second):
    steps = list(steps)
    steps[first], steps[second] = steps[second], steps[first]
    return steps


def arguments_of(case, rank):
    """Those of train_step on three ranks, right but for one thing, and mostly on one rank only."""
    x, y = batch()
    m, steps, shape = 4, one_f_one_b(3, 4)[rank], (3, TOKENS, WIDTH)
    stage = cut(make_net(), 3, rank)
    if case == "no micro-batches":
        m = 0
    elif case == "n doesn't divide":
        x, y = x[:10], y[:10]
    elif case == "n is 0":
        x, y = x[:0], y[:0]
    elif case == "other lengths":
        y = y[:8]
    elif case == "no x":
        x = None
    elif case == "no y":
        y = None
    elif case == "other shape":
        shape = (4, TOKENS, WIDTH) if rank == 1 else shape
    elif case == "no shape":
        shape = None if rank == 2 else shape
    elif case == "other number":
        m, steps = (3, one_f_one_b(3, 3)[1]) if rank == 1 else (m, steps)
    elif case == "a step missing":
        steps = steps[:-1] if rank == 2 else steps
    elif case == "a step twice":
        steps = [*steps, ("forward", 0)] if rank == 0 else steps
    elif case == "no such step":
        steps = [*steps, ("forward", 4)] if rank == 0 else steps
    elif case == "backward first":
        steps = swapped(steps, 0, 1) if rank == 2 else steps
    elif case == "another order":
        steps = swapped(steps, 0, 1) if rank == 0 else steps
    elif case == "lists of the other end":
        steps = one_f_one_b(3, 4)[2 - rank]
    elif case == "other dtype":
        stage = stage.float() if rank == 1 else stage
    elif case == "no whole number":
        m = 4.0 if rank == 1 else m
    elif case == "no list":
        steps = torch.zeros(8, 2) if rank == 1 else steps
    x, y = x if rank == 0 else None, y if rank == 2 else None
    return stage, steps, x, y, mean_loss, m, shape


REFUSALS = {
    "no micro-batches": "micro_batches=0: must be at least 1",
    "n doesn't divide": "10 examples can't be cut into 4",
    "n is 0": "0 examples can't be cut into 4",
    "other lengths": "x on rank 0 has 12 examples, y on rank 2 has 8",
    "no x": "rank 0, the first stage, needs x",
    "no y": "rank 2, the last stage, needs y",
    "other shape": "rank 1 has shape=(4, 5, 8), and a micro-batch has 12 / 4 = 3 examples",
    "no shape": "rank 2 needs shape",
    "other number": "rank 0 has micro_batches=4, rank 1 has micro_batches=3",
    "a step missing": "rank 2: steps: ('backward', 3) is missing",
    "a step twice": "rank 0: steps: ('forward', 0) is there twice",
    "no such step": "rank 0: steps: number 8 is neither",
    "backward first": "rank 2: steps: ('backward', 0) comes before ('forward', 0)",
    "another order": "forward passes come in the order [1, 0, 2, 3] on rank 0, and [0, 1, 2, 3]",
    "lists of the other end": "ranks [0, 1, 2] would wait for each other",
    "other dtype": "one dtype on all ranks, and have {0: 'torch.float64', 1: 'torch.float32'",
    "no whole number": "rank 1: micro_batches=4.0: must be a whole number",
    "no list": "rank 1: steps must be a list, and are Tensor",
}


def refused():
    """What each case says on this rank, and how many messages there were, of two and of all."""
    counted = {"batch_isend_irecv": 0, "all_gather_object": 0}

    def count(name, function):
        def counting(*arguments, **options):
            counted[name] += 1
            return function(*arguments, **options)
        return counting

    for name in counted:
        setattr(dist, name, count(name, getattr(dist, name)))
    said = {}
    try:
        for case in REFUSALS:
            arguments = arguments_of(case, dist.get_rank())
            counted.update(dict.fromkeys(counted, 0))
            try:
                train_step(*arguments)
                words = "nothing was raised"
            except ValueError as error:
                words = str(error)
            grads = [p.grad for p in arguments[0].parameters() if p.grad is not None]
            said[case] = words, *counted.values(), len(grads)
    finally:
        for name in counted:
            setattr(dist, name, getattr(torch.distributed.distributed_c10d, name))
    return said, train_step(*arguments_of("none", dist.get_rank()))  # all is as good as before


@pytest.fixture(scope="module")
def all_refused():
    """What each rank said of each case. In one call, and where it hangs once."""
    return ranks(refused, world=3, seconds=30)


@pytest.mark.parametrize("case", REFUSALS)
def test_a_mistake_is_refused_on_all_ranks_before_anything_is_sent(case, all_refused):
    for said, _ in all_refused:
        words, *counts = said[case]
        assert REFUSALS[case] in words
        assert counts == [0, 1, 0]
    assert all_refused[2][1] > 0
