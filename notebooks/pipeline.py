"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass from rank to rank.

    from pipeline import gpipe, one_f_one_b, train_step

    steps = one_f_one_b(stages=4, micro_batches=8)[rank]
    loss = train_step(stage, steps, x, y, loss_function, 8, (n // 8, width))

A *stage* is a rank's part of the network, and the rank's number in the group is the stage's. A
*schedule* is data: for each stage a list of ("forward", i) and ("backward", i), where i is a
micro-batch. `gpipe` is that of Huang et al., arXiv:1811.06965, with backward passes in the order of
the forward passes. `one_f_one_b` is PipeDream-Flush, of Narayanan et al., arXiv:2006.09503, called
1F1B in arXiv:2104.04473. Chapter 19 writes all three in the open. Needs PyTorch 2.13.
"""

import functools
import operator

import torch
from torch.nn.parallel import DistributedDataParallel

KINDS = ("forward", "backward")


# --- schedules ------------------------------------------------------------------------------------


def gpipe(stages, micro_batches):
    """All forward passes, then all backward passes: a list of steps for each stage.

    A stage holds all micro-batches. TypeError for what is no whole number, ValueError below 1.
    """
    _check_count("stages", stages)
    _check_count("micro_batches", micro_batches)
    return [_alternating(micro_batches, micro_batches) for _ in range(stages)]


def one_f_one_b(stages, micro_batches):
    """One forward, one backward, in turns: a list of steps for each stage.

    A backward pass comes as soon as it can. So stage s holds at most min(micro_batches, stages - s)
    micro-batches. Where messages take no time and stages are equally fast, the whole takes as long
    as with `gpipe`. TypeError for what is no whole number, ValueError below 1.
    """
    _check_count("stages", stages)
    _check_count("micro_batches", micro_batches)
    return [_alternating(min(micro_batches, stages - stage), micro_batches)
            for stage in range(stages)]


def _alternating(warm_up, micro_batches):
    """`warm_up` forward passes, then backward and forward in turns, then what is left."""
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(micro_batches):
        steps.append(("backward", i))
        if warm_up + i < micro_batches:
            steps.append(("forward", warm_up + i))
    return steps


def _check_count(name, number):
    if isinstance(number, bool):
        raise TypeError(f"{name}={number}: must be a whole number")
    try:
        operator.index(number)
    except TypeError:
        raise TypeError(f"{name}={number!r}: must be a whole number") from None
    if number < 1:
        raise ValueError(f"{name}={number}: must be at least 1")


def _peers(kind, stage):
    """The stages that a pass gets its message from, and sends its own to; some don't exist."""
    return (stage - 1, stage + 1) if kind == "forward" else (stage + 1, stage - 1)


# --- a training step ------------------------------------------------------------------------------


def train_step(module, steps, x, y, loss_function, micro_batches, shape, group=None):
    """One pass of the whole batch through all stages and back, on each rank of `group`.

    module: this rank's stage, one tensor in, one out.
    steps: this stage's list, such as gpipe(stages, micro_batches)[rank].
    x, y: `[n, ...]`, x on the first stage and y on the last. Elsewhere None; what is given there is
        not used. Both are cut along dimension 0 in `micro_batches` equal parts.
    loss_function: (outputs, y) -> their loss, a mean over the examples; used on the last stage.
    shape: of one micro-batch as it arrives from the stage before, `(n / micro_batches, ...)`; not
        used on the first stage. What is sent has the dtype of the modules' parameters.

    Adds to the parameters' `.grad` what `backward()` of the whole batch's loss would; zeroes
    nothing. Returns that loss on the last stage, a tensor without dimensions or graph, and None
    elsewhere. It is the whole batch's only where examples don't meet in the module (BatchNorm sees
    one micro-batch at a time, and dropout draws for each), and where the loss is a mean over as
    many things in each micro-batch: with padding that is left out, divide a sum by the batch's
    number. A weight that two stages share has in each the gradient of its own use: add them up.
    Replicas of a pipeline, too, add up after the step: all-reduce `.grad` over the replicas.

    Between two steps a rank sends what it has made, receives what it needs next, both in one batch,
    and waits for both. So no order of these two can make neighbours wait for each other, and
    nothing waits to be sent: an output is dropped once its backward pass has run.

    All ranks tell each other what they were given, by one `all_gather_object`, and where something
    is wrong with it on one of them, all raise ValueError: no whole number of micro-batches, or
    different ones; `no_grad`; a module wrapped in DistributedDataParallel, whose replicas would end
    unequal; a list in which a step is missing, twice or out of order; lists that would wait for
    each other; x or y missing; lengths that differ or don't divide; a `shape` with another number
    of examples; different dtypes. An output that hasn't the next stage's `shape`, or that would be
    rounded where it is sent, is known to one rank only, and later: that one raises, as with any
    error in a module or a loss, and the others wait until its process ends.
    """
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise ValueError("train_step: this process is not in the group")
    stages = torch.distributed.get_world_size(group)
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    device = torch.get_default_device() if parameter is None else parameter.device
    wrong = _wrong_alone(module, steps, micro_batches)
    own = {"wrong": wrong} if wrong else {
        "wrong": None,
        "micro_batches": micro_batches,
        "steps": tuple(tuple(step) for step in steps),
        "x": _length(x),
        "y": _length(y),
        "shape": _shape(shape),
        "dtype": None if parameter is None else parameter.dtype,
    }
    told = [None] * stages
    torch.distributed.all_gather_object(told, own, group=group)
    refusal = _refusal(told)
    if refusal is not None:
        raise ValueError(f"train_step: {refusal}")

    dtypes = [row["dtype"] for row in told if row["dtype"] is not None]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
    shape_after = told[rank + 1]["shape"] if rank + 1 < stages else None
    stage = _Stage(module, loss_function, micro_batches, dtype, rank, stages, shape_after)
    if rank == 0:
        stage.x_parts = x.chunk(micro_batches)
    if rank == stages - 1:
        stage.y_parts = y.chunk(micro_batches)

    made, target = None, None  # what the step before has made, and for whom
    for kind, i in steps:
        source, next_target = _peers(kind, rank)
        received = None
        if 0 <= source < stages:
            of_message = shape if kind == "forward" else shape_after
            received = torch.empty(tuple(of_message), dtype=dtype, device=device)
        _exchange(made, target, received, source, group)
        made = stage.forward(i, received) if kind == "forward" else stage.backward(i, received)
        target = next_target
    _exchange(made, target, None, None, group)
    return stage.loss


def _exchange(made, target, received, source, group):
    """Send `made`, where there is a target, fill `received`, if there is one, and wait for both."""
    operations = []
    if made is not None:
        operations.append(torch.distributed.P2POp(
            torch.distributed.isend, made, group=group, group_peer=target))
    if received is not None:
        operations.append(torch.distributed.P2POp(
            torch.distributed.irecv, received, group=group, group_peer=source))
    if operations:
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()


class _Stage:
    """The passes of one stage. It holds a micro-batch from its forward to its backward pass."""

    def __init__(self, module, loss_function, micro_batches, dtype, rank, stages, shape_after):
        self.module = module
        self.loss_function = loss_function
        self.micro_batches = micro_batches
        self.dtype = dtype
        self.rank = rank
        self.is_first = rank == 0
        self.is_last = rank == stages - 1
        self.shape_after = shape_after
        self.x_parts = None
        self.y_parts = None
        self.loss = None
        self.held = {}  # by micro-batch: what came in, and what went out or its loss

    def forward(self, i, received):
        """What goes to the next stage, None on the last one."""
        inputs = self.x_parts[i] if self.is_first else received.requires_grad_()
        outputs = self.module(inputs)
        if self.is_last:
            loss = self.loss_function(outputs, self.y_parts[i]) / self.micro_batches
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
            self.held[i] = (inputs, loss)
            return None
        if tuple(outputs.shape) != self.shape_after:
            raise ValueError(f"train_step: the output of stage {self.rank} has the shape "
                             f"{tuple(outputs.shape)}, and stage {self.rank + 1} was told "
                             f"shape={self.shape_after}")
        if torch.promote_types(outputs.dtype, self.dtype) != self.dtype:
            raise ValueError(f"train_step: the output of stage {self.rank} is {outputs.dtype}, and "
                             f"would be rounded to the parameters' {self.dtype} where it is sent")
        outputs = outputs.to(self.dtype)
        self.held[i] = (inputs, outputs)
        return outputs.detach().contiguous()

    def backward(self, i, received):
        """What goes to the stage before, None on the first one. received: None on the last one."""
        inputs, outputs = self.held.pop(i)
        if outputs.requires_grad or self.is_last:
            outputs.backward(received)
        if self.is_first:
            return None
        # Zeros where the result doesn't depend on the inputs.
        return torch.zeros_like(inputs) if inputs.grad is None else inputs.grad.contiguous()


# --- refusals: each rank tells what it was given, and all come to the same conclusion ------------


def _length(tensor):
    is_batch = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    return len(tensor) if is_batch else None


def _shape(shape):
    """A tuple; None where it is no shape."""
    if not isinstance(shape, tuple | list) or not shape:
        return None
    is_shape = all(isinstance(size, int) and 0 <= size < 2**63 for size in shape)
    return tuple(shape) if is_shape else None


def _wrong_alone(module, steps, micro_batches):
    """What is wrong with what this rank was given, without the others' numbers; or None."""
    if not torch.is_grad_enabled():
        return "it needs gradients, and is called within no_grad"
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        return ("a stage wrapped in DistributedDataParallel would end with other gradients than "
                "its replicas; give its .module, then all-reduce .grad over the replicas")
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
        return f"micro_batches={micro_batches!r}: must be a whole number, an int"
    if micro_batches < 1:
        return f"micro_batches={micro_batches}: must be at least 1"
    if not isinstance(steps, list | tuple):
        return f"steps must be a list, and are {type(steps).__name__}"
    seen = set()
    for place, step in enumerate(steps):
        if not _is_step(step, micro_batches):
            return (f"steps: number {place} is neither ('forward', i) nor ('backward', i) with i "
                    f"from 0 to {micro_batches - 1}")
        kind, i = step
        if (kind, i) in seen:
            return f"steps: {(kind, i)} is there twice"
        if kind == "backward" and ("forward", i) not in seen:
            return f"steps: {(kind, i)} comes before {('forward', i)}"
        seen.add((kind, i))
    for kind in KINDS:
        for i in range(micro_batches):
            if (kind, i) not in seen:
                return f"steps: {(kind, i)} is missing"
    return None


def _is_step(step, micro_batches):
    if not isinstance(step, list | tuple) or len(step) != 2:
        return False
    kind, i = step
    return isinstance(kind, str) and kind in KINDS and type(i) is int and 0 <= i < micro_batches


def _refusal(told):
    """Why all ranks must raise, from what all have told; None where all is well."""
    for rank, row in enumerate(told):
        if row["wrong"]:
            return f"rank {rank}: {row['wrong']}"
    last = len(told) - 1
    micro_batches = told[0]["micro_batches"]
    for rank, row in enumerate(told):
        if row["micro_batches"] != micro_batches:
            return (f"rank 0 has micro_batches={micro_batches}, rank {rank} has "
                    f"micro_batches={row['micro_batches']}")
    n, labels = told[0]["x"], told[last]["y"]
    if n is None:
        return "rank 0, the first stage, needs x, a tensor [n, ...]"
    if labels is None:
        return f"rank {last}, the last stage, needs y, a tensor [n, ...]"
    if n != labels:
        return f"x on rank 0 has {n} examples, y on rank {last} has {labels}"
    if n == 0 or n % micro_batches:
        return f"{n} examples can't be cut into {micro_batches} equal micro-batches"
    for rank, row in enumerate(told[1:], 1):
        shape = row["shape"]
        if shape is None:
            return (f"rank {rank} needs shape, a tuple of whole numbers, that of one micro-batch "
                    "as it arrives")
        if shape[0] != n // micro_batches:
            return (f"rank {rank} has shape={shape}, and a micro-batch has {n} / "
                    f"{micro_batches} = {n // micro_batches} examples")
    dtypes = {rank: str(row["dtype"]) for rank, row in enumerate(told) if row["dtype"] is not None}
    if len(set(dtypes.values())) > 1:
        return f"the parameters must have one dtype on all ranks, and have {dtypes}"
    return _wrong_together(tuple(row["steps"] for row in told))


@functools.lru_cache(maxsize=16)  # the lists are mostly those of the step before
def _wrong_together(lists):
    """Why ranks with these lists would wait for each other, or take one message for another."""
    stages = len(lists)
    for kind in KINDS:
        orders = [[i for each, i in steps if each == kind] for steps in lists]
        for rank, order in enumerate(orders):
            if order != orders[0]:
                return (f"steps: the {kind} passes come in the order {orders[0]} on rank 0, and "
                        f"{order} on rank {rank}")

    before = []  # by stage and place in its list: (peer, message) of what goes before that place
    place_of = []  # by stage and message: that place
    for stage, steps in enumerate(lists):
        before.append([[] for _ in range(len(steps) + 1)])
        place_of.append({})
        for place, (kind, i) in enumerate(steps):
            source, target = _peers(kind, stage)
            for peer, message, its_place in [(source, (kind, i, source, stage), place),
                                             (target, (kind, i, stage, target), place + 1)]:
                if 0 <= peer < stages:
                    before[stage][its_place].append((peer, message))
                    place_of[stage][message] = its_place

    at = [0] * stages  # where each stage is: before this place of its list
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(lists):
            if at[stage] <= len(steps) and all(
                    place_of[peer][message] <= at[peer]
                    for peer, message in before[stage][at[stage]]):
                at[stage] += 1
                moved = True
    waiting = [rank for rank, steps in enumerate(lists) if at[rank] <= len(steps)]
    if waiting:
        return (f"steps: ranks {waiting} would wait for each other, after "
                f"{[at[rank] for rank in waiting]} steps")
    return None
