"""Sharded data parallelism after ZeRO: stages 1 and 2 as optimizers, stage 3 as FSDP.

    copy_from_rank_0(net)                                                      # stage 1
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=1e-3)

    model = FSDP(net)                                                          # stage 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_function(model(x), y).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Every rank runs the same program, under torchrun, on its share of the batch. Made for PyTorch 2.13.
Where torch.distributed has no reduce_scatter_single and all_gather_single, call them by their
earlier names, reduce_scatter_tensor and all_gather_into_tensor.
"""

import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize


class Collectives:
    """The halves of an all-reduce. Each returns its result and a function that waits for it."""

    def reduce_scatter(self, whole):  # [ranks * n] -> [n], this rank's shard of the sum
        shard = whole.new_empty(len(whole) // dist.get_world_size())
        return shard, dist.reduce_scatter_single(shard, whole, async_op=True).wait

    def all_gather(self, shard):  # [n] -> [ranks * n], the shards of all ranks
        whole = shard.new_empty(len(shard) * dist.get_world_size())
        return whole, dist.all_gather_single(whole, shard, async_op=True).wait


class Cut:
    """A tensor of `shape`, flat, padded with zeros, and cut into equal shards, one a rank."""

    def __init__(self, shape):
        self.shape, self.numbers, self.ranks = shape, shape.numel(), dist.get_world_size()
        self.size = -(-self.numbers // self.ranks)  # of a shard, rounded up
        self.begin = dist.get_rank() * self.size

    def mine(self, whole):
        """This rank's shard without the padding: a view, if `whole` is contiguous."""
        return whole.reshape(-1)[self.begin : self.begin + self.size]

    def pad(self, flat, count):
        """`flat`, filled up to `count` shards."""
        missing = count * self.size - len(flat)
        return F.pad(flat, (0, missing)) if missing else flat

    def join(self, flat):
        """The tensor, from all shards one after the other: a view."""
        return flat[: self.numbers].view(self.shape)


class Shards(torch.optim.Optimizer):
    """An `optimizer_cls` for this rank's shard of each parameter."""

    def __init__(self, params, optimizer_cls, **options):
        if optimizer_cls.__name__ in ("Adafactor", "LBFGS", "Muon"):
            raise ValueError(f"optimizer_cls={optimizer_cls.__name__} needs whole tensors; take "
                             "one that is elementwise, such as Adam")
        self.cuts, self.shards = {}, {}  # for each parameter
        self.make, self.local = lambda shards: optimizer_cls(shards, **options), None
        super().__init__(params, options)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if not p.is_contiguous():
                raise ValueError(f"the parameter of shape {tuple(p.shape)} should be contiguous")
            dist.broadcast(p.detach(), src=0)
            self.cuts[p] = Cut(p.shape)
            self.shards[p] = self.cuts[p].mine(p.detach())  # shares the parameter's memory
        own = {**group, "params": [self.shards[p] for p in group["params"]]}
        if self.local is None:
            self.local = self.make([own])
            self.defaults = self.local.defaults
        else:
            self.local.add_param_group(own)
        copy_options(self.local.param_groups[-1], group)


def copy_from_rank_0(module):
    """All ranks begin with rank 0's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("module is on the meta device: it has no values to share")
    kinds = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, [(t.shape, t.dtype, t.requires_grad) for t in tensors])
    if any(each != kinds[0] for each in kinds):
        raise ValueError("the ranks' modules differ in their parameters or buffers")
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.detach().copy_(whole)


class ShardedStep(Shards):
    collectives = Collectives()

    def reduce(self, p):
        """Adds this rank's shard of the mean gradient of `p` to what it has."""
        cut, shard = self.cuts[p], self.shards[p]
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        total, wait = self.collectives.reduce_scatter(cut.pad(gradient.reshape(-1), cut.ranks))
        wait()
        mean = total[: len(shard)] / cut.ranks
        shard.grad = mean if shard.grad is None else shard.grad + mean

    def reduce_all(self):
        """As `reduce`, from zero, for each parameter that has a gradient on any rank."""
        device = next(iter(self.shards)).device
        users = torch.tensor([p.grad is not None for p in self.shards], dtype=int, device=device)
        dist.all_reduce(users)
        for p, count in zip(self.shards, users.tolist()):
            self.shards[p].grad = None
            if count > 0:
                self.reduce(p)

    def gather(self, p, shard):
        whole, wait = self.collectives.all_gather(self.cuts[p].pad(shard, 1))
        wait()
        return self.cuts[p].join(whole)


def copy_options(source, target):
    """A parameter group's learning rate and so on, not its parameters."""
    target.update((name, value) for name, value in source.items() if name != "params")


class ShardedUpdate(ShardedStep):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p, shard in self.shards.items():
            shard.data = self.cuts[p].mine(p.detach())  # where p's data has been replaced
        self.reduce_all()
        for group, local in zip(self.param_groups, self.local.param_groups):
            copy_options(group, local)  # a schedule may have changed them
        self.local.step()
        for p, shard in self.shards.items():
            if shard.grad is not None:
                p.copy_(self.gather(p, shard))
                shard.grad = None
        return loss

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for shard in self.shards.values():
            shard.grad = None


SINGLE = {"step", "mu", "eta", "mu_product"}  # numbers that optimizers keep beside their arrays


class ShardedOptimizer(ShardedUpdate):
    """ZeRO's stage 1: an `optimizer_cls` that has state for this rank's shard of the parameters.

    `step` takes the mean of all ranks' gradients, updates this rank's shard and gathers the rest.
    `optimizer_cls` must be elementwise, as SGD and Adam are. `p.grad` is this rank's gradient only:
    don't clip or unscale it. For frozen parameters and buffers call copy_from_rank_0(module) first.
    """

    def state_dict(self):
        """What one process would save, whole. Communicates, so all ranks call it."""
        return self.converted(self.local.state_dict(), self.param_groups, lambda p, key, value:
                              self.gather(p, value) if value.dim() else value)

    def load_state_dict(self, saved):
        """From `state_dict`, of as many ranks as it may have been, or of one process."""
        self.local.load_state_dict(self.converted(saved, saved["param_groups"], self.own))
        for group, local in zip(self.param_groups, self.local.param_groups):
            copy_options(local, group)

    def own(self, p, key, value):
        if value.dim() and value.shape != p.shape:
            raise ValueError(f"saved: {key} has shape {tuple(value.shape)}, not {tuple(p.shape)}")
        whole = value.shape == p.shape and key not in SINGLE
        return self.cuts[p].mine(value) if whole else value

    def converted(self, saved, groups, convert):
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = {i: {key: convert(parameters[i], key, torch.as_tensor(value)).clone()
                     for key, value in each.items()} for i, each in saved["state"].items()}
        numbered = [dict(group) for group in saved["param_groups"]]
        for source, target in zip(groups, numbered):
            copy_options(source, target)
        return {"state": state, "param_groups": numbered}


class ShardedGradients(ShardedOptimizer):
    """ZeRO's stage 2: reduces each gradient as soon as it is complete, and frees it.

    All ranks must use the same parameters in every backward pass, each of which sends.
    """

    def add_param_group(self, group):
        super().add_param_group(group)
        for p in self.param_groups[-1]["params"]:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce_and_free)

    def reduce_and_free(self, p):
        if p.grad is None:
            raise RuntimeError("another ShardedGradients has taken this gradient")
        self.reduce(p)
        p.grad = None

    def reduce_all(self):  # is done
        if any(p.grad is not None for p in self.shards):
            raise RuntimeError("a parameter was frozen when this optimizer was made")


class Unshard(nn.Module):
    """Between a parameter's shard, which is stored, and the whole, which is read."""

    def __init__(self, cut, fsdp):
        super().__init__()
        self.given = cut, fsdp  # a tuple, since `fsdp` is no child of this module

    def forward(self, shard):
        return Gather.apply(shard, *self.given)

    def right_inverse(self, shard):
        return shard


class Gather(torch.autograd.Function):
    """A whole tensor from shards; backwards, the whole gradient to shards of the mean."""

    @staticmethod
    def forward(ctx, shard, cut, fsdp):
        ctx.given = shard, cut, fsdp
        return fsdp.lend(shard, cut)

    @staticmethod
    def backward(ctx, gradient):
        shard, cut, fsdp = ctx.given
        fsdp.send(shard, cut, gradient)
        return None, None, None


class ShardedModule(nn.Module):
    """Keeps this rank's shard of each parameter of `module`, and gathers it when it is read."""

    collectives = Collectives()

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        if any(isinstance(each, nn.RNNBase) for each in module.modules()):
            raise ValueError("module has an nn.RNN, LSTM or GRU, which keep lists of their weights")
        self.compute_dtype, self.names = compute_dtype, list(module.state_dict())
        self.lent, self.sent = {}, []
        copy_from_rank_0(module)
        self.cuts = {p: Cut(p.shape) for p in module.parameters()}
        places = [(owner, name, p) for owner in module.modules()
                  for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)]
        for p, cut in self.cuts.items():
            p.data = cut.pad(cut.mine(p.data), 1).clone()
        for owner, name, p in places:
            unshard = Unshard(self.cuts[p], self)
            parametrize.register_parametrization(owner, name, unshard, unsafe=True)
        self.module = module

    def parameters(self, recurse=True):
        """In the order that `module` had, by which an optimizer numbers its state."""
        return iter(self.cuts if recurse else ())

    def cast(self, value):
        change = self.compute_dtype and torch.is_tensor(value) and value.is_floating_point()
        return value.to(self.compute_dtype) if change else value


class Lending(ShardedModule):
    def start(self, shard, cut):
        return self.collectives.all_gather(self.cast(shard.detach()))

    def fetch(self, shard, cut):
        whole, wait = self.start(shard, cut)
        wait()
        return cut.join(whole)

    def lend(self, shard, cut):
        whole = self.fetch(shard, cut)
        note = weakref.ref(whole.untyped_storage()), whole.dtype, shard, cut, shard._version
        self.lent[whole.data_ptr()] = note
        return whole

    def pack(self, tensor):  # called for each tensor that autograd saves
        note = self.lent.get(tensor.untyped_storage().data_ptr())
        if not note or note[0]() is None or tensor.dtype != note[1] or tensor.is_conj():
            return tensor  # not a lent weight, or not as it was lent
        return *note[2:], tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, saved):  # called when the backward pass needs it
        if torch.is_tensor(saved):
            return saved
        shard, cut, version, *view = saved
        if shard._version != version:
            raise RuntimeError("a parameter was changed between the forward and the backward pass")
        return self.fetch(shard, cut).as_strided(*view)


UNFINISHED = "finish_gradient_synchronization() was not called after the last backward pass"


class Reducing(Lending):
    def forward(self, *inputs, **options):
        if self.sent and torch.is_grad_enabled():
            raise RuntimeError(UNFINISHED)
        inputs = [self.cast(value) for value in inputs]
        options = {name: self.cast(value) for name, value in options.items()}
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.module(*inputs, **options)

    def send(self, shard, cut, gradient):
        self.receive(most=1)
        flat = cut.pad(gradient.reshape(-1), cut.ranks)
        self.sent.append((shard, *self.collectives.reduce_scatter(flat)))

    def receive(self, most=0):
        while len(self.sent) > most:
            shard, total, wait = self.sent.pop(0)
            wait()
            mean = total.to(shard.dtype) / dist.get_world_size()
            shard.grad = mean if shard.grad is None else shard.grad + mean

    def finish_gradient_synchronization(self):
        """To be called after each backward pass, before the optimizer's step."""
        self.receive()
        self.lent.clear()


class FSDP(Reducing):
    """ZeRO's stage 3: `module` keeps this rank's shard of each parameter, gradient and their state.

    A parameter is gathered when it is read, and again where the backward pass needs it: a copy, so
    what is written into it is lost. With `compute_dtype`, parameters and tensor arguments are cast,
    buffers aren't. The optimizer gets `parameters()`, flat shards, and must be elementwise. Their
    `grad` is there after finish_gradient_synchronization(), to be called after each backward pass.
    All ranks run every pass, through the same layers in the same order.
    """

    @torch.no_grad()
    def gather_full_params(self):
        """The wrapped module's `state_dict`, whole, buffers as on this rank. All ranks call it."""
        found = {}
        for name in self.names:
            path, _, last = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if parametrize.is_parametrized(owner, last):
                cut, _ = owner.parametrizations[last][0].given
                whole, wait = self.collectives.all_gather(owner.parametrizations[last].original)
                wait()
                found[name] = cut.join(whole).clone()
            else:
                found[name] = getattr(owner, last).detach().clone()
        return found
