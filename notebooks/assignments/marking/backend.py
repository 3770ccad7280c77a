"""A backend of torch.distributed for a solution's process: the judge carries the messages.

What is started reaches the judge at once. What came of it is in its tensor only after `wait`, as a
careless reader of an unfinished message deserves. Used by `solution`, where there is PyTorch.
"""

import contextlib

import torch
import torch._dynamo  # noqa: F401  once, before the fork: else each rank's first optimizer does it
import torch.distributed as dist

NAME = "judged"
OPERATIONS = {name: getattr(dist.ReduceOp, name) for name in (
    "SUM", "AVG", "PRODUCT", "MIN", "MAX")}
NOT_CARRIED = ["send", "recv", "recv_anysource", "reduce", "gather", "scatter", "alltoall",
               "all_to_all_single", "alltoall_base", "monitored_barrier", "allreduce_coalesced"]


class Message(dist.Work):
    """A message on its way. `deliver` puts what came of it, a list of arrays, into tensors."""

    def __init__(self, fetch, deliver):
        super().__init__()
        self.fetch, self.deliver = fetch, deliver

    def wait(self, timeout=None):
        if self.fetch:
            fetch, self.fetch = self.fetch, None
            for tensor, values in zip(self.deliver, fetch(), strict=True):
                tensor.data.copy_(torch.from_numpy(values.copy()).view(tensor.shape))
        return True

    def is_completed(self):
        return self.wait()

    def get_future(self):
        raise NotImplementedError("get_future isn't there when this is marked: use wait")


class Group(dist.ProcessGroup):
    """The ranks of one call. `start(kind, arrays, detail)` hands a message to the judge, and
    returns a function that waits for what comes of it."""

    def __init__(self, rank, world, start):
        super().__init__(rank, world)
        self.world, self.start = world, start

    def getBackendName(self):
        return NAME

    def size(self):
        return self.world

    def message(self, kind, given, filled, detail=""):
        for tensor in (*given, *filled):
            if not tensor.is_contiguous():
                raise ValueError(f"{kind}: Tensors must be contiguous")
        arrays = [tensor.detach().numpy() for tensor in given]
        return Message(self.start(kind, arrays, detail), filled)

    def allreduce(self, tensors, opts=None):
        return self.message("all_reduce", tensors, tensors, name_operation(opts))

    def broadcast(self, tensors, opts=None):
        return self.message("broadcast", tensors, tensors, str(opts.rootRank))

    def allgather(self, filled, tensors, opts=None):
        return self.message("all_gather", tensors, filled[0])

    def all_gather_single(self, filled, tensor, opts=None):
        return self.message("all_gather", [tensor], filled.chunk(self.world))

    def reduce_scatter(self, filled, lists, opts=None):
        return self.message("reduce_scatter", lists[0], filled, name_operation(opts))

    def reduce_scatter_single(self, filled, tensor, opts=None):
        return self.message("reduce_scatter", tensor.chunk(self.world), [filled],
                            name_operation(opts))

    def barrier(self, opts=None):
        return self.message("barrier", [], [])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def not_carried(name):
    def refuse(self, *_, **__):
        raise NotImplementedError(f"{name} isn't there when this is marked; the text says what is")
    return refuse


for each in NOT_CARRIED:
    setattr(Group, each, not_carried(each))


def name_operation(options):
    for name, operation in OPERATIONS.items():
        if options.reduceOp == operation:
            return name
    raise ValueError(f"only {', '.join(OPERATIONS)} are there when this is marked")


@contextlib.contextmanager
def joined(rank, world, start):
    """torch.distributed is ready in this block, as one rank of `world`."""
    torch.set_num_threads(1)
    dist.Backend.register_backend(NAME, lambda *_: Group(rank, world, start), devices=["cpu"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if dist.is_initialized():   # the solution may have left
            dist.destroy_process_group()
