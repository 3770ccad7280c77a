"""notebooks/sharded_train.py in hard cases, on 1 to 4 ranks: as one process, or it says why not.

What most people meet is in tests/programs/test_sharded.py.
"""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

from helpers.cluster import torchrun

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

import sharded_train  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ranks import ranks  # noqa: E402
from sharded_train import (  # noqa: E402
    FSDP,
    ShardedGradients,
    ShardedOptimizer,
    copy_from_rank_0,
)
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402
from torch.optim.optimizer import _global_optimizer_pre_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

PROGRAM = Path(sharded_train.__file__)
STAGES = {"stage 1": ShardedOptimizer, "stage 2": ShardedGradients}
KINDS = [*STAGES, "FSDP"]


# --- one process beside a stage on several ranks --------------------------------------------------


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def layer():
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5),
                         nn.Linear(5, 3)).double()


def data(step=0):
    source = torch.Generator().manual_seed(100 + step)
    return (torch.randn(12, 6, generator=source).double(),
            torch.randn(12, 3, generator=source).double())


def all_of(x):
    return x


def mine(x):
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


def made(kind, plain, cls=torch.optim.SGD, **options):
    """A model and its optimizer, of a stage or of one process."""
    options = {"lr": 0.1, **options}
    if kind in STAGES:
        copy_from_rank_0(plain)
        return plain, STAGES[kind](plain.parameters(), cls, **options)
    model = FSDP(plain) if kind == "FSDP" else plain
    return model, cls(model.parameters(), **options)


def inside(model):
    return model.module if isinstance(model, FSDP) else model


def finish(model):
    if isinstance(model, FSDP):
        model.finish_gradient_synchronization()


def weights(model):
    return model.gather_full_params() if isinstance(model, FSDP) else model.state_dict()


def gap(act, make=small, kinds=KINDS, cls=torch.optim.SGD, **options):
    """How far from one process `act(model, optimizer, share)` ends; `share` takes a rank's part."""
    plain, optimizer = made("one process", make(), cls, **options)
    act(plain, optimizer, all_of)
    found = [0.0]
    for kind in kinds:
        model, optimizer = made(kind, make(), cls, **options)
        act(model, optimizer, mine)
        for name, value in weights(model).items():
            if value.numel() > 0:
                found.append((value - plain.state_dict()[name]).abs().max().item())
    return max(found)


def said(action):
    try:
        action()
        return "nothing said"
    except Exception as error:
        return f"raises: {error}"


def sayings(act, make=small, kinds=("FSDP",), cls=torch.optim.SGD):
    """What each kind says to `act(model, optimizer, share)`."""
    found = []
    for kind in kinds:
        model, optimizer = made(kind, make(), cls)
        found.append(said(partial(act, model, optimizer, mine)))
    return found


def loss_of(model, share, step=0):
    x, y = data(step)
    return F.mse_loss(model(share(x)), share(y))


def one_pass(model, share, step=0):
    loss_of(model, share, step).backward()
    finish(model)


def steps(model, optimizer, share, count=2):
    for step in range(count):
        optimizer.zero_grad()
        one_pass(model, share, step)
        optimizer.step()


RIGHT = []  # functions that return a difference from one process
REFUSED = {}  # functions that return what was said, and words of each


def right(function):
    RIGHT.append(function)
    return function


def refused(*words):
    def note(function):
        REFUSED[function] = words
        return function
    return note


# --- networks -------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """Parameters of no element, of one, a scalar, and fewer numbers than ranks; one isn't used."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = layer(), layer()
        self.none = nn.Parameter(torch.empty(0, 3).double())
        self.one = nn.Parameter(torch.ones(1).double())
        self.three = nn.Parameter(torch.tensor([1.0, 2, 3]).double())
        self.scalar = nn.Parameter(torch.tensor(2.0).double())
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x):
        return (self.net(x) + self.none.sum()) * self.one * self.scalar * self.three + self.whole


class Mixed(nn.Module):
    """A layer three times, a frozen one between, passes without gradients, a ParameterDict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.often, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scales = nn.ParameterDict({"a": torch.ones(5), "b": torch.ones(5)})
        self.double()

    def forward(self, x):
        x = self.first(x) * self.scales["a"]
        for _ in range(3):
            x = self.frozen(F.relu(self.often(x)))
            with torch.no_grad():
                x += F.relu(self.often(x))
        return self.last(x * self.scales["b"])


class Unusual(nn.Module):
    """Attention, weight norm, a list of parameters, a weight that another layer reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.scales = nn.ParameterList([torch.ones(6), torch.ones(6) / 2])
        self.last = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        x = x[:, None] * self.scales[0] + self.scales[1]
        x = self.normed(self.attention(x, x, x)[0]) + x
        return self.last(x[:, 0]) + F.linear(x[:, 0], self.normed.weight)[:, :3]


class Views(nn.Module):
    """Saves its weights as views: transposed, a slice, complex."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.turned, self.sliced = (nn.Parameter(torch.randn(6, 6) / 4) for _ in range(2))
        self.pairs = nn.Parameter(torch.randn(3, 2))
        self.double()

    def forward(self, x):
        x = F.linear(x, self.turned.t()) @ self.sliced[:, 1:4] @ self.sliced[:3, :3]
        return (x * torch.view_as_complex(self.pairs)).abs()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
        self.last = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.last(self.encoder(x[:, None])[:, 0])


class Checkpointed(nn.Module):
    """Computes its activations again in the backward pass, in one of three ways."""

    def __init__(self, way):
        super().__init__()
        self.net, self.way = net(), way

    def inside(self, x):
        return F.linear(x, self.net[0].weight, self.net[0].bias).tanh()

    def forward(self, x):
        x = x + 0 * x.detach().requires_grad_().sum()
        if self.way == "function":
            x = checkpoint(self.inside, x, use_reentrant=False)
        else:
            x = checkpoint(self.net[:2], x, use_reentrant=self.way == "reentrant")
        return self.net[2:](x)


def tied():
    module = net().extend([nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)]).double()
    module[6].weight = module[2].weight
    return module


@right
def networks():
    found = [gap(steps, Sizes, cls=torch.optim.Adam)]
    for make in Mixed, Unusual, Views, tied:
        found.append(gap(steps, make))
    for way in "function", "module", "reentrant":
        found.append(gap(steps, partial(Checkpointed, way)))
    return max(found)


@right
def evaluated_between_steps():
    outputs = []

    def act(model, optimizer, share):
        steps(model, optimizer, share, 1)
        model.eval()
        with torch.no_grad():
            outputs.append(model(data(9)[0]).clone())
        with torch.inference_mode():
            outputs.append(model(data(9)[0]).clone())
        model.train()
        steps(model, optimizer, share, 1)
    # There is one token, so gradients of queries and keys are nothing but rounding, which Adam's
    # usual eps would make large.
    apart = gap(act, Transformer, cls=torch.optim.Adam, eps=1e-4)
    return max(apart, *((out - outputs[0]).abs().max().item() for out in outputs))


@right
def tied_after_wrapping():
    def act(model, optimizer, share):
        inside(model)[3].weight = inside(model)[2].weight
        steps(model, optimizer, share)
    return gap(act, lambda: nn.Sequential(*net()[:3], nn.Linear(5, 5), nn.Linear(5, 3)).double())


@right
def parametrized_before():
    found = []
    for change in (nn.utils.weight_norm, parametrizations.spectral_norm,
                   parametrizations.orthogonal,
                   partial(prune.l1_unstructured, name="weight", amount=0.3)):
        def make(change=change):
            module = nn.Sequential(layer())
            torch.manual_seed(4)
            change(module[0])
            return module
        found.append(gap(steps, make))
    return max(found)


@right
def channels_last():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()

    def act(model, optimizer, share):
        model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        x = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(0)).double()
        F.mse_loss(model(share(x)), share(data()[1])).backward()
        finish(model)
        optimizer.step()
    return gap(act, make)


@right
def complex_parameters():
    norms = []

    def make():
        torch.manual_seed(0)
        return nn.Linear(6, 3).to(torch.complex128)

    def act(model, optimizer, share):
        x, y = data()
        (model(share(x).to(torch.complex128)) - share(y)).abs().square().mean().backward()
        finish(model)
        if share is all_of:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        else:
            norm = (model if isinstance(model, FSDP) else optimizer).clip_grad_norm(0.01)
        norms.append(norm.item())
        optimizer.step()
    apart = max(gap(act, make), gap(act, make, cls=torch.optim.Adam))
    return max(apart, max(norms) - min(norms))


# --- optimizers and their state -------------------------------------------------------------------


@right
def optimizers_and_their_state():
    """Two steps, all state to one process and back, two steps more."""
    kinds = torch.optim
    found = []
    for cls, options in [
            (kinds.Adam, {"fused": True}), (kinds.Adam, {"amsgrad": True, "maximize": True}),
            (kinds.AdamW, {"foreach": True}), (kinds.RAdam, {}), (kinds.ASGD, {}),
            (kinds.Adadelta, {}), (kinds.Adamax, {}), (kinds.Rprop, {}), (kinds.NAdam, {}),
            (kinds.Adagrad, {"initial_accumulator_value": 0.1}),
            (kinds.RMSprop, {"momentum": 0.9, "centered": True}),
            (kinds.SGD, {"momentum": 0.9, "nesterov": True, "fused": True})]:
        def act(model, optimizer, share, cls=cls, options=options):
            steps(model, optimizer, share)
            if isinstance(model, FSDP):
                state = model.gather_optimizer_state(optimizer)
            else:
                state = optimizer.state_dict()
            plain = cls(layer().parameters(), lr=0.05, **options)
            plain.load_state_dict(copy.deepcopy(state))
            if isinstance(model, FSDP):
                model.load_optimizer_state(optimizer, plain.state_dict())
            else:
                optimizer.load_state_dict(plain.state_dict())
            steps(model, optimizer, share)
        found.append(gap(act, layer, cls=cls, lr=0.05, **options))
    return max(found)


class Counts(torch.optim.SGD):
    """Its steps get shorter by a number that it keeps in its groups."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["k"])


@right
def counts_in_its_groups():
    model, optimizer = made("stage 1", small(), Counts)
    steps(model, optimizer, mine)
    assert optimizer.param_groups[0]["k"] == optimizer.state_dict()["param_groups"][0]["k"] == 2
    return gap(partial(steps, count=4), cls=Counts)


def kind_of(optimizer):
    return next((kind for kind, cls in STAGES.items() if type(optimizer) is cls), None)


@right
def closures():
    def act(model, optimizer, share):
        for step in range(2):
            def closure(step=step):
                optimizer.zero_grad()
                one_pass(model, share, step)
                return torch.tensor(1.5)
            assert optimizer.step(closure) == 1.5
    return gap(act)


@right
def optimizer_from_before_and_in_the_backward_pass():
    plain, truth = small(), small()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model = FSDP(plain)
    steps(model, optimizer, mine)
    steps(truth, torch.optim.AdamW(truth.parameters(), lr=0.1), all_of)
    found = [apart(model, truth)]
    model, truth = FSDP(small()), small()
    own = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(p):
        own[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(2):
        one_pass(model, mine, number)
    steps(truth, torch.optim.AdamW(truth.parameters(), lr=0.1), all_of)
    return max(*found, apart(model, truth))


def apart(model, truth):
    found = weights(model)
    return max((found[name] - value).abs().max().item()
               for name, value in truth.state_dict().items())


@right
def two_models():
    def act(model, optimizer, share):
        kind = kind_of(optimizer) or ("FSDP" if isinstance(model, FSDP) else "one process")
        torch.manual_seed(7)
        second, other = made(kind, nn.Linear(3, 3).double())
        for step in range(2):
            x, y = data(step)
            optimizer.zero_grad()
            other.zero_grad()
            F.mse_loss(second(model(share(x))), share(y)).backward()
            finish(model)
            finish(second)
            optimizer.step()
            other.step()
    return gap(act)


# --- gradients: cleared, added up, frozen ---------------------------------------------------------


@right
def cleared_gradients():
    """However gradients are cleared after a backward pass, they don't come back."""
    found = []
    for way in "net", "optimizer", "None", "net to zero", "optimizer to zero":
        def act(model, optimizer, share, way=way):
            one_pass(model, share, 5)
            if way == "None":
                for p in model.parameters():
                    p.grad = None
            else:
                zero = (model if way.startswith("net") else optimizer).zero_grad
                zero(set_to_none="zero" not in way)
            one_pass(model, share)
            optimizer.step()
        found.append(gap(act, cls=torch.optim.AdamW))
    return max(found)


@right
def cleared_before_the_step_or_never():
    def cleared(model, optimizer, share):
        one_pass(model, share)
        model.zero_grad()
        optimizer.step()

    def never(model, optimizer, share):
        for step in range(3):
            one_pass(model, share, step)
            one_pass(model, share, step + 3)
            optimizer.step()
    return max(gap(cleared), gap(never))


@right
def optimizer_made_anew():
    """A cell that makes the optimizer is run twice: the second one is right."""
    truth = small()
    steps(truth, torch.optim.SGD(truth.parameters(), lr=0.1), all_of)
    found = []
    for kind in STAGES:
        model, optimizer = made(kind, small())
        one_pass(model, mine, 5)
        model, optimizer = made(kind, model)
        model.zero_grad()
        steps(model, optimizer, mine)
        found.append(apart(model, truth))
    return max(found)


@right
def used_on_one_rank_only():
    """A rank that did not use a weight counts as zero in the mean, and weights stay apart."""
    first, other = (nn.Parameter(torch.full((3,), value, dtype=torch.float64)) for value in (1, 9))
    optimizer = ShardedOptimizer([first, other], torch.optim.SGD, lr=1.0)
    (first if dist.get_rank() == 0 else other).sum().backward()
    optimizer.step()
    k = dist.get_world_size()
    return max((first - (1 - 1 / k)).abs().max().item(),
               (other - (9 - (k - 1) / k)).abs().max().item())


@right
def frozen_and_unfrozen():
    def between(model, optimizer, share):
        for step in range(4):
            optimizer.zero_grad()
            one_pass(model, share, step)
            optimizer.step()
            next(model.parameters()).requires_grad_(step % 2 == 1)

    def later(model, optimizer, share):
        inside(model)[2].requires_grad_(True)
        steps(model, optimizer, share)

    def frozen():
        module = net()
        module[2].requires_grad_(False)
        return module
    return max(gap(between, cls=torch.optim.AdamW), gap(later, frozen, ["stage 1", "FSDP"]))


@right
def several_passes():
    def kept_graph(model, optimizer, share, finish_each=True):
        loss = loss_of(model, share)
        loss.backward(retain_graph=True)
        if finish_each:
            finish(model)
        loss.backward()
        finish(model)
        optimizer.step()

    def two_forwards(model, optimizer, share):
        (loss_of(model, share, 0) + loss_of(model, share, 1)).backward()
        finish(model)
        optimizer.step()

    def adversarial(model, optimizer, share):
        x = share(data()[0]).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x)
        F.mse_loss(model(x.detach() + 0.1 * slope.sign()), share(data()[1])).backward()
        finish(model)
        optimizer.step()

    def penalty(model, optimizer, share):
        x = share(data()[0]).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
        finish(model)
        optimizer.step()
    return max(gap(kept_graph), gap(partial(kept_graph, finish_each=False)), gap(two_forwards),
               gap(adversarial), gap(penalty))


@right
def hooks_of_a_user():
    """Each parameter once, when its gradient is there, also if it was used twice."""
    truth = tied()
    loss_of(truth, all_of).backward()
    model, seen = FSDP(tied()), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad.clone())))
    one_pass(model, mine)
    true = {p: each.grad for p, each in zip(model.parameters(), truth.parameters())}
    assert len(seen) == len({id(p) for p, _ in seen}) == len(true)
    return max((gradient - p.cut.shard(true[p])).abs().max().item() for p, gradient in seen)


# --- what is called, read, changed ----------------------------------------------------------------


@right
def called_in_parts_and_after_an_error():
    model, truth = FSDP(net()), net()
    x, y = data()
    assert "raises" in said(lambda: model(torch.ones(2, 99).double()))
    gaps = [(model.module(x) - truth(x)).abs().max(),
            (model.module[:2](x) - truth[:2](x)).abs().max()]
    F.mse_loss(model.module(mine(x)), mine(y)).backward()
    finish(model)
    loss_of(truth, all_of).backward()
    for p, true in zip(model.parameters(), truth.parameters(), strict=True):
        gaps.append((p.grad - p.cut.shard(true.grad)).abs().max())
    return max(gaps).item()


class Scaled(nn.Module):
    """A scale that is read in one of several ways."""

    def __init__(self, way="forward"):
        super().__init__()
        self.net = layer()
        self.scale = nn.Parameter(torch.tensor([2.0]).double())
        self.keep = [self.scale]
        self.way = way

    def forward(self, x):
        if self.way == "parameters":
            return self.net(x) + 0.1 * sum(p.norm() for p in self.net.parameters())
        if self.way == "list":
            return self.net(x) * self.keep[0]
        return self.net(x) if self.way == "loss" else self.net(x) * self.scale

    def encode(self, x):
        return self.net(x) * self.scale


def scaled(way, model, optimizer, share):
    x, y = data()
    if way == "method":
        loss = F.mse_loss(inside(model).encode(share(x)), share(y))
    elif way == "loss":
        loss = F.mse_loss(model(share(x)) * inside(model).scale.exp(), share(y))
    elif way == "penalty":
        loss = loss_of(model, share) + 0.1 * sum(p.norm() for p in model.parameters())
    else:
        loss = loss_of(model, share)
    loss.backward()
    finish(model)
    optimizer.step()


WAYS = ["parameters", "list", "loss", "method", "penalty"]


@right
def read_elsewhere_in_stages():
    return max(gap(partial(scaled, way), partial(Scaled, way), STAGES) for way in WAYS)


@refused(*["in a forward, by its name"] * 5)
def read_elsewhere():
    return [sayings(partial(scaled, way), partial(Scaled, way))[0] for way in WAYS]


@right
def type_changed():
    def act(model, optimizer, share):
        model.double()
        steps(model, optimizer, share)
    return gap(act, lambda: net().float(), ["stage 1", "FSDP"])


@right
def data_replaced_in_stage_1():
    def act(model, optimizer, share):
        model[0].weight.data = torch.full_like(model[0].weight, 0.5)
        steps(model, optimizer, share)
    return gap(act, kinds=["stage 1"])


@right
def buffers_are_rank_0s_at_first_and_then_each_ranks_own():
    found = []
    for kind in KINDS:
        plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3).requires_grad_(False)).double()
        for values in plain.state_dict().values():
            values.fill_(dist.get_rank() + 1)
        model, _ = made(kind, plain)
        first = weights(model)
        found.extend((value - 1).abs().max().item() for value in first.values())
        x = mine(data()[0])
        model(x)
        mean = 0.9 + 0.1 * x.mean(0)
        found.append((inside(model)[0].running_mean - mean).abs().max().item())
    return max(found)


@right
def whole_weights_are_rank_0s():
    model = FSDP(net())
    torch.manual_seed(1)
    other = net()
    for p in other.parameters():
        p.data.mul_(1 + dist.get_rank())
    model.load_full_params(other.state_dict())
    for p in other.parameters():
        p.data.div_(1 + dist.get_rank())
    names = [name for name, _ in model.module.named_parameters()]
    assert names == [name for name, _ in net().named_parameters()]
    return apart(model, other)


# --- what is refused ------------------------------------------------------------------------------


@refused("added or replaced", "added or replaced", "replaced or copied", "replaced or copied",
         "replaced or copied")
def changed_after_wrapping():
    def added(model, optimizer, share):
        inside(model).append(nn.Linear(3, 3).double())
        one_pass(model, share)

    def layer_replaced(model, optimizer, share):
        inside(model)[2] = nn.Linear(5, 3).double()
        one_pass(model, share)

    def replaced(model, optimizer, share):
        inside(model)[0].weight = nn.Parameter(torch.ones(5, 6).double())
        one_pass(model, share)

    def copied(model, optimizer, share):
        copy.deepcopy(inside(model))(data()[0])

    def assigned(model, optimizer, share):
        model.load_state_dict(model.state_dict(), assign=True)
        one_pass(model, share)
    return [sayings(act)[0] for act in (added, layer_replaced, replaced, copied, assigned)]


@refused(*["initialise the module before"] * 9)
def initialised_after():
    init = nn.init
    found = []
    for function in (init.orthogonal_, init.eye_, partial(init.sparse_, sparsity=0.2),
                     init.trunc_normal_, init.kaiming_uniform_, init.xavier_normal_):
        model = FSDP(nn.Linear(6, 5))
        found.append(said(lambda model=model, function=function: function(model.module.weight)))
    for each in nn.Linear(6, 5), nn.Embedding(4, 3), nn.Bilinear(2, 2, 2):
        model = FSDP(each)
        found.append(said(model.module.reset_parameters))
    return found


@refused("LSTM", "by DDP already", "max_norm", "register them after wrapping", "sharded already",
         "sharded already")
def wrapped_modules():
    hooked = small()
    hooked[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    return [said(partial(FSDP, module)) for module in (
        nn.LSTM(4, 2), nn.parallel.DistributedDataParallel(small()),
        nn.Embedding(3, 2, max_norm=1.0), hooked, FSDP(small()).module,
        nn.Sequential(FSDP(small())))]


@refused(*["needs whole"] * 4)
def whole_tensor_optimizers():
    class Mine(torch.optim.Adafactor):
        pass
    found = [said(partial(cls, small().parameters(), Mine)) for cls in STAGES.values()]
    for cls in Mine, torch.optim.Muon:
        model = FSDP(small())
        optimizer = cls([p for p in model.parameters() if p.dim() == 2], lr=0.1)
        one_pass(model, mine)
        found.append(said(optimizer.step))
    return found


@refused("clip or clear after", "clip or clear after", "without inputs=", "create_graph",
         "register_post_accumulate_grad_hook", "was not called", "was not called", "was not called")
def gradients_of_fsdp():
    def cleared(model, optimizer, share, to_none):
        loss_of(model, share).backward()
        model.zero_grad(set_to_none=to_none)
        finish(model)

    def with_inputs(model, optimizer, share):
        loss_of(model, share).backward(inputs=list(model.parameters()))
        finish(model)

    def twice(model, optimizer, share):
        loss_of(model, share).backward(create_graph=True)

    def hooked(model, optimizer, share):
        inside(model)[0].weight.register_hook(lambda gradient: gradient * 2)
        one_pass(model, share)

    def clipped(model, optimizer, share):
        loss_of(model, share).backward()
        model.clip_grad_norm(1.0)

    def in_a_closure(model, optimizer, share):
        optimizer.step(lambda: loss_of(model, share).backward())

    def after_the_last(model, optimizer, share):
        for step in range(2):
            loss_of(model, share, step).backward()
    return [sayings(act)[0] for act in (
        partial(cleared, to_none=True), partial(cleared, to_none=False), with_inputs, twice, hooked,
        clipped, in_a_closure, after_the_last)]


@refused("did not come by a backward pass", "call add_param_group", "call add_param_group",
         *["hooks of state_dict"] * 4, *["take its state_dict()"] * 4)
def edited_optimizers():
    def by_hand(model, optimizer, share):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    def moved(model, optimizer, share):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.0})
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop())
        steps(model, optimizer, share)
    found = [*sayings(by_hand, kinds=["stage 2"]), *sayings(moved, kinds=STAGES)]
    _, optimizer = made("stage 1", small())
    for name in ("register_state_dict_pre_hook", "register_state_dict_post_hook",
                 "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"):
        found.append(said(partial(getattr(optimizer, name), print)))
    for cls in STAGES.values():
        optimizer = cls(small().parameters(), torch.optim.SGD)
        found += [said(partial(action, optimizer)) for action in (copy.deepcopy, pickle.dumps)]
    return found


@refused("has shape (2, 2), not (2, 3)", "has shape (2, 2), not (2, 3)", "shape (4,), not (5,)",
         "Missing key", "FSDP's load_state_dict", "gather_full_params", "gather_full_params")
def saved_elsewhere():
    other = nn.Linear(2, 2).double()
    optimizer = torch.optim.Adam(other.parameters(), foreach=False)
    other(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    first = made("stage 1", nn.Linear(3, 2).double(), torch.optim.Adam)[1]
    model, third = made("FSDP", nn.Linear(3, 2).double(), torch.optim.Adam)
    short = {**net().state_dict(), "0.bias": torch.zeros(4).double()}
    lacking = net().state_dict()
    del lacking["0.bias"]
    whole = FSDP(net())
    return [said(lambda: first.load_state_dict(state)),
            said(lambda: model.load_optimizer_state(third, state)),
            said(lambda: FSDP(net()).load_full_params(short)),
            said(lambda: FSDP(net()).load_full_params(lacking)),
            said(lambda: whole.module[0].load_state_dict(whole.module[0].state_dict())),
            said(lambda: copy.deepcopy(whole)), said(lambda: pickle.dumps(whole))]


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_is_as_one_process(case):
    for world in 1, 2, 3, 4:
        assert max(ranks(case, world=world)) < 1e-12, world


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_is_refused_on_each_rank(case):
    for world in 1, 3:
        for found in ranks(case, world=world):
            for said, words in zip(found, REFUSED[case], strict=True):
                assert said.startswith("raises: ") and words in said


def what_is_freed():
    there = []
    before = len(_global_optimizer_pre_hooks)
    for kind in KINDS:
        model, optimizer = made(kind, small())
        steps(model, optimizer, mine)
        there += [weakref.ref(model), weakref.ref(inside(model)[0].weight), weakref.ref(optimizer)]
        del model, optimizer
    gc.collect()
    return [each() is None for each in there], len(_global_optimizer_pre_hooks) - before


def test_what_is_dropped_is_freed():
    for world in 1, 2:
        for freed, hooks in ranks(what_is_freed, world=world):
            assert all(freed) and hooks == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_run_as_a_program_it_trains(stage):
    printed = torchrun(PROGRAM, 2, arguments=["--stage", stage, "--steps", 60], log=None)
    assert "step 60: loss" in printed[0]
    for text in printed:
        assert float(text.split(" % right")[0].split()[-1]) > 40, "ten kinds: 10 % by chance"
        assert ("weights kept: 134,661" in text) == (stage == 3), "half of them in stage 3"


def test_an_older_pytorch_is_refused_by_name():
    code = "import torch.distributed as d; del d.reduce_scatter_single; import sharded_train"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROGRAM.parent, capture_output=True,
                          text=True)
    assert done.returncode != 0 and "sharded_train.py needs 2.13 or newer" in done.stderr
