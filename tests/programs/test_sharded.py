"""notebooks/sharded_train.py on two ranks: as one process, as PyTorch's own, or it says why not.

More ranks, and what is rare: tests/tools/test_sharded_hard.py.
"""

import copy
import time
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ranks import ranks  # noqa: E402
from sharded_train import (  # noqa: E402
    FSDP,
    Collectives,
    ShardedGradients,
    ShardedOptimizer,
    copy_from_rank_0,
)
from torch import nn  # noqa: E402

STAGES = [1, 2, 3]
KINDS = {1: ShardedOptimizer, 2: ShardedGradients}
ADAM = {"lr": 0.01, "weight_decay": 0.1}


class Awkward(nn.Module):
    """Odd sizes, a scalar, fewer numbers than ranks, tied, frozen and unused ones, a buffer.

    No parameter's true gradient is zero: Adam would divide rounding by rounding.
    """

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Linear(12, 15), nn.LayerNorm(15), nn.Conv1d(1, 3, 3)
        self.first, self.last = nn.Linear(15, 15), nn.Linear(15, 15)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(15, 15).requires_grad_(False)
        self.unused, self.some = nn.Linear(3, 3), nn.Embedding(5, 15)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("shift", torch.randn(15))

    def forward(self, x):
        x = self.norm(self.stem(x)) + self.shift
        x = x + self.conv(x[:, None]).mean((1, 2))[:, None] * self.scale
        x = x + self.some((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0))
        return self.last(self.frozen(torch.relu(self.first(x))))


def batch(step):
    source = torch.Generator().manual_seed(step)
    return (torch.randn(12, 12, generator=source).double(),
            torch.randn(12, 15, generator=source).double())


def share(x):
    """This rank's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def make(stage):
    """What to call, and its optimizer; stage 0 is one process. Ranks begin with their own seeds."""
    torch.manual_seed(dist.get_rank() if stage else 0)
    net = Awkward().double()
    if stage in KINDS:
        copy_from_rank_0(net)
    model = FSDP(net) if stage == 3 else net
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": trained[:4]}, {"params": trained[4:], "lr": 0.003}]
    if stage in KINDS:
        return model, KINDS[stage](groups, torch.optim.AdamW, **ADAM)
    return model, torch.optim.AdamW(groups, **ADAM)


def train(stage, model, optimizer, steps):
    """Two backward passes a step, a clipped norm, a rate that falls; returns the norms."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for half in (2 * step, 2 * step + 1):
            x, y = batch(half)
            F.mse_loss(model(share(x)), share(y)).backward()
            if stage == 3:
                model.finish_gradient_synchronization()
        if stage == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        else:
            norm = (model if stage == 3 else optimizer).clip_grad_norm(0.3)
        norms.append(norm.item())
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return torch.tensor(norms)


def save(stage, model, optimizer):
    """Whole weights and the optimizer's whole state."""
    if stage == 3:
        return model.gather_full_params(), model.gather_optimizer_state(optimizer)
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def load(stage, model, optimizer, saved):
    weights, state = saved
    if stage == 3:
        model.load_full_params(weights)
        model.load_optimizer_state(optimizer, state)
    else:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))


def run(stage, steps, saved=None):
    """(what is saved after these steps, begun anew or from what was `saved`; norms)"""
    model, optimizer = make(stage)
    if saved:
        load(stage, model, optimizer, saved)
    norms = train(stage, model, optimizer, steps)
    return save(stage, model, optimizer), norms


def apart(found, truth):
    """The largest difference of two nested structures of tensors; other values must be equal."""
    if torch.is_tensor(truth):
        assert found.shape == truth.shape and found.dtype == truth.dtype
        return (found - truth).abs().max().item() if truth.numel() else 0
    if isinstance(truth, dict):
        assert found.keys() == truth.keys()
        return max((apart(found[key], truth[key]) for key in truth), default=0)
    if isinstance(truth, list | tuple):
        assert len(found) == len(truth)
        return max((apart(*pair) for pair in zip(found, truth)), default=0)
    if isinstance(truth, float):
        return abs(found - truth)
    assert found == truth
    return 0


@pytest.mark.parametrize("stage", STAGES)
def test_trains_as_one_process_and_saves_the_same(stage):
    """Weights, frozen ones and buffers too; Adam's whole state, its groups; norms."""
    truth = ranks(run, 0, range(4), world=1)
    assert apart(ranks(run, stage, range(4)), truth * 2) < 1e-12


@pytest.mark.parametrize("stage", STAGES)
def test_goes_on_from_one_process_and_one_process_from_it(stage):
    [(truth, _)] = ranks(run, 0, range(4), world=1)
    [(half, _)] = ranks(run, 0, range(2), world=1)
    for found, _ in ranks(run, stage, range(2, 4), half):
        assert apart(found, truth) < 1e-12
    half, _ = ranks(run, stage, range(2))[1]
    [(found, _)] = ranks(run, 0, range(2, 4), half, world=1)
    assert apart(found, truth) < 1e-12


# --- as PyTorch's own -----------------------------------------------------------------------------


def five_steps(way):
    """The weights after five steps on this rank's parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 15))
    type_of_layers = torch.bfloat16 if way.endswith("bfloat16") else None
    model = net
    if way.startswith("FSDP"):
        model = FSDP(net, type_of_layers)
    elif way.startswith("fully_shard"):
        policy = MixedPrecisionPolicy(param_dtype=type_of_layers)
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    if way == "stage 1":
        optimizer = ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    elif way == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step)
        F.mse_loss(model(share(x).float()).float(), share(y).float()).backward()
        if way.startswith("FSDP"):
            model.finish_gradient_synchronization()
        if way == "ZeroRedundancyOptimizer":
            for p in net.parameters():
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}, "master gradients"
        optimizer.step()
    if way.startswith("FSDP"):
        return model.gather_full_params()
    return {name: getattr(value, "full_tensor", value.clone)()
            for name, value in net.state_dict().items()}


@pytest.mark.parametrize("ours, theirs", [
    ("stage 1", "ZeroRedundancyOptimizer"), ("FSDP", "fully_shard"),
    ("FSDP in bfloat16", "fully_shard in bfloat16")])
def test_trains_as_pytorchs_own(ours, theirs):
    """A sum of two numbers has one order only, so there is little rounding that could differ."""
    assert apart(ranks(five_steps, ours), ranks(five_steps, theirs)) < 1e-6


# --- what is held ---------------------------------------------------------------------------------


def odd_net():
    """Four layers, whose sizes two ranks can't divide."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(51, 51) for _ in range(4)])


def count_alive(memories):
    """How many still exist, when gloo's threads have let go of what they sent; 5 s at most."""
    end = time.monotonic() + 5
    while any(memory() is not None for memory in memories) and time.monotonic() < end:
        time.sleep(0.01)
    return sum(memory() is not None for memory in memories)


class Watched(Collectives):
    """Has weak references to all whole tensors that were gathered or sent."""

    def __init__(self):
        self.gathered, self.sent = [], []

    def all_gather(self, shard):
        whole, wait = super().all_gather(shard)
        self.gathered.append(weakref.ref(whole.untyped_storage()))
        return whole, wait

    def reduce_scatter(self, whole):
        self.sent.append(weakref.ref(whole.untyped_storage()))
        return super().reduce_scatter(whole)


def held_by_stage_2():
    """Whole gradients that exist when another one comes, and before the step; in shards, then."""
    net = odd_net()
    memories, alive = [], []

    def look(p):  # before the optimizer's own hook, which takes the gradient away
        alive.append(count_alive(memories))
        memories.append(weakref.ref(p.grad.untyped_storage()))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(look)
    optimizer = ShardedGradients(net.parameters(), torch.optim.Adam)
    net(torch.ones(2, 51)).sum().backward()
    in_shards = sum(part.grad.numel() for part in optimizer.shards.values())
    return alive, count_alive(memories), in_shards


def test_stage_2_holds_no_whole_gradient_when_the_next_one_comes_nor_before_the_step():
    total = sum(p.numel() for p in odd_net().parameters())
    held = ranks(held_by_stage_2)
    for alive, before_the_step, _ in held:
        assert alive == [0] * 8 and before_the_step == 0
    assert sum(in_shards for *_, in_shards in held) == total


def held_by_stage_3():
    """Whole weights after the forward pass; whole weights and gradients after the backward pass."""
    model = FSDP(odd_net())
    model.collectives = Watched()
    loss = model(torch.ones(2, 51, requires_grad=True)).sum()
    after_forward = count_alive(model.collectives.gathered)
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    kept = []
    for p in model.parameters():
        kept.append([each.untyped_storage().nbytes() // each.element_size() for each in (
            p, p.grad, optimizer.state[p]["exp_avg"])])
    gathered, sent = model.collectives.gathered, model.collectives.sent
    return after_forward, count_alive(gathered + sent), kept, (len(gathered), len(sent))


def test_stage_3_holds_shards_only_between_the_passes_and_after():
    sizes = [(p.numel() + 1) // 2 for p in odd_net().parameters()]
    for after_forward, after_backward, kept, (gathered, sent) in ranks(held_by_stage_3):
        assert after_forward == after_backward == 0
        assert kept == [[size] * 3 for size in sizes]
        assert (gathered, sent) == (8 + 4, 8), "weights again, biases not"


def state_of(kind):
    net = odd_net()
    optimizer = kind(net.parameters(), torch.optim.Adam)
    net(torch.ones(2, 51)).sum().backward()
    optimizer.step()
    return [values["exp_avg"].numel() for values in optimizer.local.state.values()]


@pytest.mark.parametrize("kind", KINDS.values())
def test_stages_1_and_2_divide_the_optimizers_state(kind):
    sizes = [p.numel() for p in odd_net().parameters()]
    first, second = ranks(state_of, kind)
    assert first == [(size + 1) // 2 for size in sizes]
    assert second == [size // 2 for size in sizes]


# --- what would be wrong in silence, or wait for ever, is refused ---------------------------------


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model):
    model(torch.ones(4, 6)).square().sum().backward()


class Either(nn.Module):
    """Ranks that use different layers: a message doesn't say whose weight it is."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        return (self.b if dist.get_rank() else self.a)(x)


class Lender(nn.Module):
    """Lets others read its weight outside of its forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) * self.scale


def step_before_finish():
    model = FSDP(small())
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()


def forward_before_finish():
    model = FSDP(small())
    backward(model)
    backward(model)


def torchs_clipping_before_finish():
    model = FSDP(small())
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.finish_gradient_synchronization()


def changed_between_the_passes():
    model = FSDP(small())
    loss = model(torch.ones(4, 6)).sum()
    with torch.no_grad():
        model.module[2].weight.mul_(2)
    loss.backward()


def another_order():
    model = FSDP(Either())
    backward(model)
    model.finish_gradient_synchronization()


def another_order_of_stage_2():
    net = Either()
    optimizer = ShardedGradients(net.parameters(), torch.optim.Adam)
    backward(net)
    optimizer.step()


def other_modules():
    FSDP(nn.Linear(2 + dist.get_rank(), 3))


def other_parameters():
    ShardedOptimizer(nn.Linear(2 + dist.get_rank(), 3).parameters(), torch.optim.Adam)


def whole_tensor_optimizer():
    ShardedOptimizer(small().parameters(), torch.optim.Adafactor)


def whole_tensor_optimizer_of_shards():
    model = FSDP(small())
    optimizer = torch.optim.Adafactor(model.parameters())
    backward(model)
    model.finish_gradient_synchronization()
    optimizer.step()


def shards_of_the_other_rank():
    model = FSDP(small())
    files = [None, None]
    dist.all_gather_object(files, model.state_dict())
    model.load_state_dict(files[1 - dist.get_rank()])


def whole_weights_by_load_state_dict():
    FSDP(small()).load_state_dict(small().state_dict(), strict=False)


def read_outside_of_a_forward():
    model = FSDP(Lender())
    (model(torch.ones(4, 6)) * model.module.scale).sum().backward()


def initialised_after_wrapping():
    model = FSDP(small())
    nn.init.xavier_uniform_(model.module[0].weight)


def tied_by_memory():
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    net[1].weight.data = net[0].weight.data
    FSDP(net)


def edited_group():
    optimizer = ShardedOptimizer(small().parameters(), torch.optim.Adam)
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()


def copied_optimizer():
    copy.deepcopy(ShardedOptimizer(small().parameters(), torch.optim.Adam))


def two_of_stage_2():
    net = small()
    both = [ShardedGradients(net.parameters(), torch.optim.Adam) for _ in range(2)]
    backward(net)
    return both


def unfrozen_in_stage_2():
    net = small()
    net[0].requires_grad_(False)
    optimizer = ShardedGradients(net.parameters(), torch.optim.Adam)
    net[0].requires_grad_(True)
    backward(net)
    optimizer.step()


REFUSED = {
    step_before_finish: "was not called", forward_before_finish: "was not called",
    torchs_clipping_before_finish: "clip or clear after", changed_between_the_passes: "was changed",
    another_order: "in another order", another_order_of_stage_2: "in another order",
    other_modules: "modules differ", other_parameters: "modules differ",
    whole_tensor_optimizer: "needs whole tensors",
    whole_tensor_optimizer_of_shards: "needs whole tensors",
    shards_of_the_other_rank: "every rank loads what it saved",
    whole_weights_by_load_state_dict: "load_full_params",
    read_outside_of_a_forward: "in a forward, by its name",
    initialised_after_wrapping: "initialise the module before",
    tied_by_memory: "tie them as one parameter", edited_group: "call add_param_group",
    copied_optimizer: "take its state_dict()", two_of_stage_2: "another ShardedGradients",
    unfrozen_in_stage_2: "frozen when this optimizer was made",
}


def refusals():
    """What each call says, by its name."""
    found = {}
    for call in REFUSED:
        found[call.__name__] = "nothing"
        try:
            call()
        except Exception as error:
            found[call.__name__] = str(error)
    return found


def test_what_would_be_wrong_in_silence_is_refused_on_both_ranks():
    for said in ranks(refusals):
        for call, words in REFUSED.items():
            assert words in said[call.__name__], call.__name__
