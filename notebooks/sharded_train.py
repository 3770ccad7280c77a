"""Sharded data parallelism after ZeRO: stages 1 and 2 as optimizers, stage 3 as FSDP.

    torchrun --standalone --nproc-per-node=2 sharded_train.py --stage 3    # trains, see --help

In a program of your own, which every rank runs on its share of the batch:

    copy_from_rank_0(net)                                                      # stage 1
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=1e-3)

    model = FSDP(net)                                                          # stage 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_function(model(x), y).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

What would be wrong in silence, or wait for ever, is refused. Needs PyTorch 2.13 or newer. (With
2.11 layers don't read whole weights.)
"""

import argparse
import os
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if not hasattr(dist, "reduce_scatter_single"):  # as in PyTorch before 2.13
    raise ImportError(f"PyTorch {torch.__version__}: sharded_train.py needs 2.13 or newer")


class Collectives:
    """The halves of an all-reduce. Each returns its result and a function that waits for it."""

    def reduce_scatter(self, whole):
        """[ranks * n] -> [n], this rank's shard of the sum."""
        shard = whole.new_empty(len(whole) // dist.get_world_size())
        sending = dist.reduce_scatter_single(shard, whole, async_op=True)
        return shard, sending.wait  # the function itself: who wants the result calls it

    def all_gather(self, shard):
        """[n] -> [ranks * n], the shards of all ranks."""
        whole = shard.new_empty(len(shard) * dist.get_world_size())
        sending = dist.all_gather_single(whole, shard, async_op=True)
        return whole, sending.wait


class Cut:
    """A tensor of `shape`, flat, padded with zeros, and cut into equal shards, one a rank."""

    def __init__(self, shape, number=0):
        self.shape = shape
        self.number = number  # of the tensor, the same on all ranks
        self.numbers = shape.numel()
        self.ranks = dist.get_world_size()
        self.size = (self.numbers + self.ranks - 1) // self.ranks  # of a shard, rounded up
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

    def shard(self, whole):
        """A copy of this rank's shard, padded, with as many dimensions as the tensor has."""
        ones = [1] * (len(self.shape) - 1)
        shape = [self.size, *ones] if self.shape else []
        return self.pad(self.mine(whole), 1).clone().reshape(shape)

    def gather(self, shard, collectives):
        """The tensor, from all ranks' shards of it. All ranks call it."""
        whole, wait = collectives.all_gather(self.pad(shard.reshape(-1), 1))
        wait()
        return self.join(whole)


# --- what all stages need -------------------------------------------------------------------------

# Optimizers that look at a parameter as a whole: a shard of it gives another update.
WHOLE = {"Adafactor", "LBFGS", "Muon"}
SINGLE = {"step", "mu", "eta", "mu_product"}  # numbers that optimizers keep beside their arrays


def copy_from_rank_0(module):
    """All ranks begin with rank 0's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    refuse_empty(tensors)
    refuse_sharded(tensors)
    refuse_different([(t.shape, t.dtype, t.requires_grad) for t in tensors])
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.detach().copy_(whole)


def refuse_empty(tensors):
    if any(tensor.is_meta or nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise ValueError("a parameter or buffer has no values to share, it is on the meta device "
                         "or lazy: initialise the module before")


def refuse_sharded(tensors):
    if any(hasattr(tensor, "cut") or hasattr(tensor, "device_mesh") for tensor in tensors):
        raise ValueError("these parameters are sharded already: build the module anew")


def refuse_different(facts):
    """Raises where the ranks' facts about what they share differ."""
    kinds = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, facts)
    if any(each != kinds[0] for each in kinds):
        raise ValueError("the ranks' modules differ in their parameters or buffers")


def refuse_other_order(order, device):
    """Raises where `order`, a number made of what was sent, isn't the same on all ranks."""
    both = torch.tensor([order, -order], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if both[0] != -both[1]:
        raise RuntimeError("the ranks used different parameters, or in another order, so their "
                           "messages were mixed up: go back to the last checkpoint, and let all "
                           "ranks take the same way through the module")


def needs_whole(optimizer_cls):
    """Whether it is one of WHOLE, or was made from one."""
    return any(base.__name__ in WHOLE for base in optimizer_cls.__mro__)


def copy_options(sources, targets):
    """From one list of parameter groups to another: learning rates and so on, not parameters."""
    for source, target in zip(sources, targets):
        target.update((name, value) for name, value in source.items() if name != "params")


def convert_state(saved, parameters, convert):
    """An optimizer's `saved` state, each value of it converted by `convert(p, key, value)`."""
    state = {}
    for number, values in saved["state"].items():
        state[number] = {}
        for key, value in values.items():
            value = torch.as_tensor(value)
            state[number][key] = convert(parameters[number], key, value).clone()
    return {"state": state, "param_groups": [dict(group) for group in saved["param_groups"]]}


def part_of_state(cut, key, value, take):
    """This rank's part of a whole value of an optimizer's state, by `take`; numbers stay."""
    if value.dim() and value.shape != cut.shape:
        raise ValueError(f"saved: {key} has shape {tuple(value.shape)}, not {tuple(cut.shape)}")
    return take(value) if value.shape == cut.shape and key not in SINGLE else value


def clip(grads, largest, also=()):
    """Scales `grads`, shards of all ranks, so that their norm together is at most `largest`."""
    device = grads[0].device if grads else None
    square = torch.zeros((), device=device)
    for grad in grads:
        square = square + grad.abs().square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1)
    for grad in [*grads, *also]:
        grad.mul_(factor.to(grad.dtype))
    return norm


# --- stages 1 and 2 -------------------------------------------------------------------------------


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO's stage 1: an `optimizer_cls` that has state for this rank's shard of the parameters.

    `step` takes the mean of all ranks' gradients, updates this rank's shard and gathers the rest:
    all ranks call it, and `state_dict`, too. `optimizer_cls` must be elementwise, as SGD and Adam
    are. `p.grad` is this rank's gradient only: clip it by this class's `clip_grad_norm`, not by
    torch's, and use no GradScaler. For frozen parameters and buffers call copy_from_rank_0(module)
    first; later buffers, such as BatchNorm's statistics, stay each rank's own.
    """

    collectives = Collectives()

    def __init__(self, params, optimizer_cls, **options):
        if not isinstance(optimizer_cls, type):
            raise TypeError("optimizer_cls should be a class, such as torch.optim.Adam; its "
                            "options follow it")
        if needs_whole(optimizer_cls):
            raise ValueError(f"optimizer_cls={optimizer_cls.__name__} needs whole tensors; take "
                             "one that is elementwise, such as Adam")
        self.optimizer_cls = optimizer_cls
        self.options = options
        self.cuts = {}  # by parameter
        self.shards = {}  # by parameter; views, which share its memory
        self.local = None  # the optimizer of the shards
        super().__init__(params, options)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        refuse_empty(group["params"])
        refuse_sharded(group["params"])
        refuse_different([(p.shape, p.dtype) for p in group["params"]])
        for p in group["params"]:
            if not p.is_contiguous():
                raise ValueError(f"the parameter of shape {tuple(p.shape)} should be contiguous: "
                                 "module.to(memory_format=torch.contiguous_format)")
            dist.broadcast(p.detach(), src=0)
            self.cuts[p] = Cut(p.shape, len(self.cuts))
            self.shards[p] = self.cuts[p].mine(p.detach())
        own = {**group, "params": [self.shards[p] for p in group["params"]]}
        if self.local is None:
            self.local = self.optimizer_cls([own], **self.options)
            self.defaults = self.local.defaults
        else:
            self.local.add_param_group(own)
        copy_options(self.local.param_groups[-1:], [group])

    def reduce(self, p):
        """Adds this rank's shard of the mean gradient of `p` to what it has."""
        cut = self.cuts[p]
        shard = self.shards[p]
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

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.check_groups()
        for p, shard in self.shards.items():
            if p.shape != self.cuts[p].shape:
                raise RuntimeError(f"a parameter had shape {tuple(self.cuts[p].shape)} and has "
                                   f"{tuple(p.shape)}: make the optimizer after such a change")
            shard.data = self.cuts[p].mine(p.detach())  # where p's data has been replaced
        self.reduce_all()
        copy_options(self.param_groups, self.local.param_groups)  # a schedule may change them
        self.local.step()
        copy_options(self.local.param_groups, self.param_groups)  # some optimizers count in them
        for p, shard in self.shards.items():
            if shard.grad is not None:
                p.copy_(self.cuts[p].gather(shard, self.collectives))
        self.forget()
        return loss

    def forget(self):
        """After a step: `p.grad` has all that a next one needs."""
        for shard in self.shards.values():
            shard.grad = None

    @torch.no_grad()
    def clip_grad_norm(self, largest):
        """As torch's clip_grad_norm_ in one process: returns the norm before. All ranks call it."""
        self.reduce_all()
        shards = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        return clip(shards, largest, also=self.local_grads())

    def local_grads(self):
        """This rank's gradients, from which `step` will reduce again."""
        return [p.grad for p in self.shards if p.grad is not None]

    def state_dict(self):
        """What one process would save, whole. Communicates, so all ranks call it."""
        saved = convert_state(self.local.state_dict(), list(self.shards), self.whole_state)
        copy_options(self.param_groups, saved["param_groups"])
        return saved

    def whole_state(self, p, key, value):
        return self.cuts[p].gather(value, self.collectives) if value.dim() else value

    def load_state_dict(self, saved):
        """From `state_dict`, of as many ranks as it may have been, or of one process."""
        self.local.load_state_dict(convert_state(saved, list(self.shards), self.own_state))
        copy_options(self.local.param_groups, self.param_groups)

    def own_state(self, p, key, value):
        return part_of_state(self.cuts[p], key, value, self.cuts[p].mine)

    def check_groups(self):
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            listed = [id(self.shards.get(p)) for p in group["params"]]
            if listed != [id(shard) for shard in local["params"]]:
                raise RuntimeError("a parameter group was edited: call add_param_group, or make "
                                   "the optimizer anew")

    def refuse_hook(self, *given, **options):
        raise RuntimeError("hooks of state_dict and load_state_dict are not called here: change "
                           "what state_dict returns, or what you load")

    register_state_dict_pre_hook = register_state_dict_post_hook = refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = refuse_hook

    def __getstate__(self):
        raise TypeError("this optimizer can't be copied or pickled: take its state_dict()")


class ShardedGradients(ShardedOptimizer):
    """ZeRO's stage 2: reduces each gradient as soon as it is complete, and frees it.

    All ranks must use the same parameters in the same order in every backward pass, each of which
    sends. After it `p.grad` is only a mark, NaN everywhere: the gradient is that of
    `optimizer.shards[p]`. Clear it in any way that PyTorch has, clip it by `clip_grad_norm`.
    """

    def add_param_group(self, group):
        if self.local is None:
            self.marks = {}  # by parameter
            self.order = 0  # a number made of all that was sent
        super().add_param_group(group)
        before = weakref.WeakMethod(self.take_mark_away)  # weak: the parameters don't keep us
        after = weakref.WeakMethod(self.reduce_and_mark)
        for p in self.param_groups[-1]["params"]:
            dtype = p.dtype if p.is_floating_point() or p.is_complex() else None
            mark = torch.full((), torch.nan, dtype=dtype, device=p.device).expand(p.shape)
            mark.is_mark = True  # it has the memory of one number
            self.marks[p] = mark
            if is_mark(p.grad):
                p.grad = None  # of an optimizer that was there before
            if p.requires_grad:
                here = weakref.ref(p)
                p.register_hook(lambda gradient, here=here: call(before, here()))
                p.register_post_accumulate_grad_hook(lambda p: call(after, p))

    def drop_cleared(self, p):
        """Where `p.grad` is None, or zero in place of NaN, it was cleared."""
        if p.grad is self.marks[p] and not p.grad.as_strided((), ()).isnan():
            p.grad.fill_(torch.nan)
            self.shards[p].grad = None
        if p.grad is None:
            self.shards[p].grad = None

    def take_mark_away(self, p):
        """Before a gradient comes: autograd would add it to the mark."""
        self.drop_cleared(p)
        if is_mark(p.grad):
            p.grad = None

    def reduce_and_mark(self, p):
        """When the gradient of `p` is complete, during the backward pass."""
        if is_mark(p.grad):
            raise RuntimeError("another ShardedGradients has taken this gradient")
        self.order = hash((self.order, self.cuts[p].number))
        self.reduce(p)
        p.grad = self.marks[p]

    def reduce_all(self):  # is done
        for p in self.shards:
            self.drop_cleared(p)
            if p.grad is not None and p.grad is not self.marks[p]:
                raise RuntimeError("a gradient did not come by a backward pass: its parameter was "
                                   "frozen when this optimizer was made, or it was set by hand")
        refuse_other_order(self.order, next(iter(self.shards)).device)

    def local_grads(self):
        return []

    def forget(self):
        pass  # until it is cleared

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=True)
        for p in self.shards:
            self.drop_cleared(p)


def is_mark(gradient):
    return getattr(gradient, "is_mark", False)


def call(weak, *given):
    """The method, if its object still exists."""
    method = weak()
    if method is not None:
        method(*given)


# --- stage 3 --------------------------------------------------------------------------------------

UNFINISHED = ("finish_gradient_synchronization() was not called after the last backward pass: call "
              "it after each; gradients add up")


class Lent(NamedTuple):
    """A whole weight that a layer has been given."""

    storage: weakref.ref  # its memory, as long as somebody holds it
    dtype: torch.dtype
    p: nn.Parameter  # whose weight it is
    version: int  # of p, so that a change is noticed


class Note(NamedTuple):
    """What autograd saves in the place of a lent weight, or of a view of it."""

    p: nn.Parameter
    version: int
    shape: torch.Size
    stride: tuple
    offset: int


class FSDP(nn.Module):
    """ZeRO's stage 3: `module` keeps this rank's shard of each parameter, gradient and their state.

    All ranks run every pass, through the same layers in the same order, and after each backward
    pass call finish_gradient_synchronization(): then the gradients are there. In a forward, by its
    name (`self.weight`), a parameter is read whole, a copy: what is written into it is lost. Read
    elsewhere, or by parameters(), it is this rank's shard, with as many dimensions, as are its
    gradient and the optimizer's state. So take an optimizer that is elementwise, such as Adam, clip
    by this class's clip_grad_norm and not by torch's, and use no GradScaler. Buffers, such as
    BatchNorm's statistics, stay each rank's own after the start. Each rank saves and loads its own
    state_dict, the optimizer's, too; for what is whole, all ranks call gather_full_params and
    load_full_params, and gather_optimizer_state and load_optimizer_state.

    With `compute_dtype`, parameters and tensor arguments are cast, buffers aren't.
    """

    collectives = Collectives()

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        refuse_module(module)
        copy_from_rank_0(module)
        refuse_shared_memory(module)
        device = next(iter(module.parameters())).device
        # The shard's gradient comes after Gather.backward, which autograd calls for this number.
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.compute_dtype = compute_dtype
        self.depth = 0  # in how many modules' calls we are
        self.order = 0  # a number made of all that was gathered and sent
        self.lent = {}  # `Lent`, by address
        self.sent = []  # gradients under way, oldest first: (p, shard of the sum, what waits)
        self.arrived = {}  # parameters whose gradients came since the last backward pass
        self.module = module
        for number, p in enumerate(module.parameters()):
            self.shard(p, number)
        for owner in module.modules():
            read_through(owner, self)
        for register in register_optimizer_step_pre_hook, register_optimizer_step_post_hook:
            hook = register(before_step)  # after a step, too: its closure may have forgotten it
            weakref.finalize(self, hook.remove)  # it looks at optimizers while this object lives

    def shard(self, p, number):
        """Makes `p` this rank's shard of what it was."""
        p.cut = Cut(p.shape, number)
        p.cut.fsdp = weakref.ref(self)
        p.data = p.cut.shard(p.data)
        p.uniform_ = p.normal_ = p.ndimension = refuse_random  # nn.init calls one of these
        refuse_gradients(p)

    def forward(self, *inputs, **options):
        if self.sent and torch.is_grad_enabled():
            raise RuntimeError(UNFINISHED)
        inputs = [self.cast(value) for value in inputs]
        options = {name: self.cast(value) for name, value in options.items()}
        with torch.autograd.graph.saved_tensors_hooks(self.save_note, self.gather_again):
            result = self.module(*inputs, **options)
        if not torch.is_grad_enabled():
            self.lent.clear()
        return result

    def cast(self, value):
        change = self.compute_dtype and torch.is_tensor(value) and value.is_floating_point()
        return value.to(self.compute_dtype) if change else value

    # 1. A parameter is read.
    def read(self, p):
        in_autograd = torch._C._current_graph_task_id() >= 0  # as checkpoint's calls are
        if p is None or self.depth == 0 and not in_autograd:
            return p
        if p.requires_grad:
            return Gather.apply(self.anchor, (p, self))
        return self.lend(p)

    # 2. Gather it, for the forward and again for the backward pass.
    def fetch(self, p):
        whole, wait = self.start(p)
        wait()
        return p.cut.join(whole)

    def start(self, p):
        """Begins to gather `p`: all shards one after the other, and a function that waits."""
        self.count_for_order(p, 0)
        return self.collectives.all_gather(self.cast(p.detach().reshape(-1)))

    def count_for_order(self, p, what):
        """For `refuse_other_order`: 0 is for a weight gathered, 1 for a gradient sent."""
        if not hasattr(p, "cut") or p.numel() != p.cut.size:
            raise RuntimeError("a parameter was replaced or copied after FSDP had sharded it")
        self.order = hash((self.order, p.cut.number, what))

    # 3. Free it: autograd saves a note in its place.
    def lend(self, p):
        whole = self.fetch(p)
        storage = weakref.ref(whole.untyped_storage())
        self.lent[whole.data_ptr()] = Lent(storage, whole.dtype, p, p._version)
        return whole

    def save_note(self, tensor):  # called for each tensor that autograd saves
        lent = self.lent.get(tensor.untyped_storage().data_ptr())
        if lent is None or lent.storage() is None:
            return tensor  # not a lent weight, though it may lie where one was
        if tensor.dtype != lent.dtype or tensor.is_conj():
            return tensor  # not as it was lent
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return Note(lent.p, lent.version, shape, stride, offset)

    def gather_again(self, saved):  # called when the backward pass needs it
        if not isinstance(saved, Note):
            return saved
        if saved.p._version != saved.version:
            raise RuntimeError("a parameter was changed between the forward and the backward pass")
        return self.fetch(saved.p).as_strided(saved.shape, saved.stride, saved.offset)

    # 4. Send its gradient, and don't wait: two are under way at most, since they take memory.
    def send(self, p, gradient):
        self.receive(most=1)
        self.count_for_order(p, 1)
        flat = p.cut.pad(gradient.reshape(-1), p.cut.ranks)
        total, wait = self.collectives.reduce_scatter(flat)
        self.sent.append((p, total, wait))

    def receive(self, most=0):
        """Waits until at most so many gradients are under way."""
        while len(self.sent) > most:
            p, total, wait = self.sent.pop(0)
            wait()
            mean = total.to(p.dtype).view_as(p) / p.cut.ranks
            p.grad = mean if p.grad is None else p.grad + mean
            self.arrived[p] = p.grad, p.grad._version

    def finish_gradient_synchronization(self):
        """To be called after each backward pass, before the optimizer's step."""
        self.receive()
        self.check_parameters()
        self.check_gradients()
        self.lent.clear()
        refuse_other_order(self.order, self.anchor.device)
        for p in self.arrived:
            run_hooks(p)
        self.arrived.clear()

    @torch.no_grad()
    def clip_grad_norm(self, largest):
        """As torch's clip_grad_norm_ in one process: returns the norm before. All ranks call it."""
        if self.sent:
            raise RuntimeError(UNFINISHED)
        return clip([p.grad for p in self.parameters() if p.grad is not None], largest)

    # Saving and loading: what is whole, which all ranks do together.

    def named(self):
        return dict(self.module.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def gather_full_params(self):
        """The wrapped module's `state_dict`, whole, buffers as on this rank. All ranks call it."""
        self.check_parameters()
        found = {}
        for name, value in self.module.state_dict().items():
            found[name] = value.clone() if torch.is_tensor(value) else value
        for name, p in self.named().items():
            if name in found:
                found[name] = p.cut.gather(p.detach(), self.collectives).clone()
        return found

    @torch.no_grad()
    def load_full_params(self, saved):
        """Whole weights and buffers as rank 0 has them, by `module`'s names. All ranks call it."""
        self.check_parameters()
        named = self.named()
        shapes = {name: tuple(getattr(value, "shape", ())) for name, value in saved.items()}
        refuse_different(list(shapes.items()))
        own = {"_extra_state": self.get_extra_state()}
        for name, value in saved.items():
            if name in named and value.shape != named[name].cut.shape:
                raise ValueError(f"saved: {name} has shape {shapes[name]}, not "
                                 f"{tuple(named[name].cut.shape)}")
            if torch.is_tensor(value):
                value = value.to(self.anchor.device).contiguous().clone()
                dist.broadcast(value, src=0)
            own[f"module.{name}"] = named[name].cut.shard(value) if name in named else value
        super().load_state_dict(own)

    def gather_optimizer_state(self, optimizer):
        """What `optimizer` would save in one process. All ranks call it."""
        return convert_state(optimizer.state_dict(), parameters_of(optimizer), self.whole_state)

    def whole_state(self, p, key, value):
        if key in SINGLE or value.shape != p.shape:
            return value
        return p.cut.gather(value, self.collectives)

    def load_optimizer_state(self, optimizer, saved):
        """From `gather_optimizer_state`, of as many ranks as it was, or of one process."""
        optimizer.load_state_dict(convert_state(saved, parameters_of(optimizer), self.own_state))

    def own_state(self, p, key, value):
        return part_of_state(p.cut, key, value, p.cut.shard)

    # Saving and loading: each rank its own shards.

    def get_extra_state(self):
        """With `state_dict`, which has this rank's shards: whose they are."""
        return {"rank": dist.get_rank(), "ranks": dist.get_world_size()}

    def set_extra_state(self, state):
        if state != self.get_extra_state():
            raise ValueError(f"these are the shards of {state}, not of {self.get_extra_state()}: "
                             "every rank loads what it saved, or all call load_full_params with "
                             "what gather_full_params gave")

    def load_state_dict(self, saved, *given, **options):
        """This rank's shards, from `state_dict`."""
        if "_extra_state" not in saved:
            raise ValueError("these are not the shards that FSDP's state_dict has: for whole "
                             "weights call load_full_params on all ranks")
        self.set_extra_state(saved["_extra_state"])  # before anything is loaded
        return super().load_state_dict(saved, *given, **options)

    def __getstate__(self):
        raise TypeError("FSDP can't be copied or pickled: take gather_full_params() of it")

    def check_parameters(self):
        for p in self.module.parameters():
            if not hasattr(p, "cut"):
                raise RuntimeError("a parameter was added or replaced after FSDP was made: do it "
                                   "before, or its gradient stays this rank's own")

    def check_gradients(self):
        """Raises unless gradients came since the last forward, and are as they came."""
        trained = any(p.requires_grad for p in self.parameters())
        if trained and self.lent and not self.arrived:
            raise RuntimeError("no gradient came since the forward pass: call backward(), without "
                               "inputs=, and then finish_gradient_synchronization()")
        for p, (gradient, version) in self.arrived.items():
            if p.grad is not gradient or gradient._version != version:
                raise RuntimeError("a gradient was changed or removed before its mean was there: "
                                   "clip or clear after finish_gradient_synchronization()")


class Gather(torch.autograd.Function):
    """A whole tensor from shards; backwards, the whole gradient to shards of the mean."""

    @staticmethod
    def forward(ctx, anchor, given):
        ctx.given = given
        ctx.set_materialize_grads(False)  # a gradient that is None stays None
        shard, fsdp = given
        return fsdp.lend(shard)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: FSDP's gradients have no derivatives")
        shard, fsdp = ctx.given
        if gradient is not None:
            fsdp.send(shard, gradient)
        return None, None


def read_through(owner, fsdp):
    """From now on `owner.weight` asks `fsdp` for the whole weight; the shard is what is stored."""
    owner.fsdp = weakref.ref(fsdp)
    reads = {}
    for name, p in owner._parameters.items():
        if p is not None:
            reads[name] = property(make_read(name))
    if reads:  # a class of the same name, with these properties
        owner.__class__ = type(type(owner).__name__, (type(owner),), reads)
    owner.register_forward_pre_hook(enter, prepend=True)
    owner.register_forward_hook(leave, always_call=True)
    owner.register_load_state_dict_pre_hook(refuse_load)


def make_read(name):
    def read(owner):
        return fsdp_of(owner).read(owner._parameters[name])
    return read


def fsdp_of(owner):
    fsdp = owner.fsdp()
    if fsdp is None:
        raise RuntimeError("the FSDP object of this module is gone, and with it the way to the "
                           "other ranks' shards: keep it")
    return fsdp


def enter(owner, inputs):
    fsdp_of(owner).depth += 1


def leave(owner, inputs, output):
    fsdp_of(owner).depth -= 1


def run_hooks(p):
    """A user's hooks, which autograd can't call: gradients come by `receive`."""
    if p._backward_hooks:
        raise RuntimeError("register_hook on a shard: gradients come by another way; take "
                           "register_post_accumulate_grad_hook")
    for hook in list((p._post_accumulate_grad_hooks or {}).values()):
        if hook is not refuse_direct:
            hook(p)


def parameters_of(optimizer):
    """The parameters of all groups, in the order of its `state_dict`."""
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


# What FSDP can't do, or would do wrong in silence, is refused.


def refuse_module(module):
    """Raises for what FSDP can't do, before anything is changed."""
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            raise ValueError("module has an nn.RNN, LSTM or GRU, which keep lists of their weights")
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise ValueError("module is wrapped by DDP already: wrap what is in it")
        if getattr(each, "max_norm", None) is not None:
            raise ValueError("module has an embedding with max_norm, which writes into its weight: "
                             "that would be lost")
    if next(module.parameters(), None) is None:
        raise ValueError("module has no parameters, so nothing to shard: use it as it is")
    for p in module.parameters():
        if not hasattr(p, "cut") and (p._post_accumulate_grad_hooks or p._backward_hooks):
            raise ValueError("a parameter has hooks, made for the whole of it: register them after "
                             "wrapping, by register_post_accumulate_grad_hook, and wrap before you "
                             "make DDP or ShardedGradients")


def refuse_shared_memory(module):
    tensors = [*module.parameters(), *module.buffers()]
    places = [tensor.data_ptr() for tensor in tensors if tensor.numel() > 0]
    for p in module.parameters():
        if p.numel() > 0 and places.count(p.data_ptr()) > 1:
            raise ValueError("two tensors have one memory, which their shards would not have: tie "
                             "them as one parameter, a.weight = b.weight")


def refuse_random(*given, **options):
    raise RuntimeError("this is one rank's shard of a parameter: initialise the module before FSDP "
                       "wraps it, or call load_full_params")


def refuse_gradients(p):
    """From now on it raises if autograd itself brings a gradient to `p`: Gather's go by `send`."""
    if not p.is_floating_point() and not p.is_complex():
        return  # has none
    trained = p.requires_grad
    p.requires_grad_(True)  # a frozen parameter takes no hook, and may be unfrozen later
    p.register_post_accumulate_grad_hook(refuse_direct)
    p.requires_grad_(trained)


def refuse_direct(p):
    raise RuntimeError("a gradient came to a shard itself: a parameter was used outside of a "
                       "forward, in another method, by parameters() or from a list. There it is "
                       "this rank's shard. Use it in a forward, by its name")


def refuse_load(module, saved, prefix, *rest):
    if not prefix:  # as in `module.load_state_dict`, not in that of FSDP
        raise ValueError("this module is sharded: shards are loaded by FSDP's load_state_dict, "
                         "whole weights by its load_full_params")


def before_step(optimizer, given, options):
    """Raises where an ordinary optimizer would step with what FSDP has made of its parameters."""
    for p in parameters_of(optimizer):
        cut = getattr(p, "cut", None)
        if cut is None:
            continue
        if needs_whole(type(optimizer)):
            raise ValueError(f"{type(optimizer).__name__} needs whole tensors, FSDP's are "
                             "shards; take one that is elementwise, such as Adam")
        if cut.fsdp() is not None and cut.fsdp().sent:
            raise RuntimeError(UNFINISHED)


# --- the program ----------------------------------------------------------------------------------


def make_images(n, seed):
    """Ten patterns of 28 x 28, with noise: something to learn where there is no data set."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=source)
    return patterns[labels] + 8 * torch.randn(n, 784, generator=source), labels


def make_stage(stage, net, lr):
    """What to call, and the optimizer, for `net` in this stage."""
    if stage == 3:
        model = FSDP(net)
        return model, torch.optim.Adam(model.parameters(), lr=lr)
    copy_from_rank_0(net)
    kind = ShardedOptimizer if stage == 1 else ShardedGradients
    return net, kind(net.parameters(), torch.optim.Adam, lr=lr)


def train_stage(stage, steps, batch_size, lr):
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(16)
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                        nn.Linear(256, 10)).to(device)
    total = sum(p.numel() for p in net.parameters())
    model, optimizer = make_stage(stage, net, lr)
    for step in range(steps):
        x, y = make_images(batch_size, seed=1 + step * ranks + rank)  # this rank's share
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        if stage == 3:
            model.finish_gradient_synchronization()
        (model if stage == 3 else optimizer).clip_grad_norm(1.0)
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    x, y = make_images(1000, seed=0)
    with torch.no_grad():
        hits = (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    kept = sum(p.numel() for p in model.parameters())
    print(f"rank {rank}: {hits / 10:.1f} % right; weights kept: {kept:,} of {total:,}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --standalone --nproc-per-node=2 sharded_train.py")
    train_stage(**vars(options))


if __name__ == "__main__":
    main()
