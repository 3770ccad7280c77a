"""What DDP of notebooks/ddp_train.py does in hard cases, and its program when something fails.

Each case runs on all ranks, and asserts there. It is compared with PyTorch's own DDP, with
find_unused_parameters=True and forward_sync_buffers=False, or with one process that has all data.
"""

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from unittest import mock

from helpers.cluster import Failed, torchrun

import psutil
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ddp_train = import_module("ddp_train")
ranks = import_module("ranks").ranks
checkpoint = import_module("torch.utils.checkpoint").checkpoint
dist = torch.distributed
nn = torch.nn
DDP = ddp_train.DDP
SCRIPT = Path(__file__).resolve().parents[2] / "notebooks/ddp_train.py"
CASES = []
MISTAKES = []  # functions that have to raise, and words of the message


def case(function):
    CASES.append(function)
    return function


def refused(words):
    def add(function):
        MISTAKES.append((function, words))
        return function
    return add


def name_of(value):
    return getattr(value, "__name__", "")


def pytorchs(net):
    return nn.parallel.DistributedDataParallel(
        net, find_unused_parameters=True, forward_sync_buffers=False)


def finish(model):
    if isinstance(model, DDP):
        model.finish_gradient_synchronization()


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def one_pass(model):
    model(torch.randn(4, 6)).square().mean().backward()
    finish(model)


def two_steps(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        one_pass(model)
        optimizer.step()


def assert_as_pytorchs(make, act, wrap=DDP, tolerance=1e-4):
    """Ours and PyTorch's end with the same gradients, parameters and buffers after `act(model)`."""
    found = []
    for way in (wrap, pytorchs):
        torch.manual_seed(dist.get_rank())
        model = way(make())
        torch.manual_seed(100 + dist.get_rank())
        act(model)
        found.append([p.grad for p in model.parameters()] + list(model.state_dict().values()))
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, tolerance, 1e-2 * tolerance)


# --- on one to four ranks: kinds of parameters, sizes of buckets, types --------------------------


class Awkward(nn.Module):
    """Tied, frozen and unused parameters; buffers; rank 0 alone uses `one`."""

    def __init__(self, dtype):
        super().__init__()
        self.unused = nn.Linear(16, 16)
        self.one = nn.Linear(16, 16)
        self.stem = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.to(dtype)
        if dtype == torch.float64:  # and one of another type
            self.one.float()

    def forward(self, x):
        x = self.norm(self.stem(x.to(self.stem.weight.dtype)))
        if dist.get_rank() == 0:
            x = self.one(x.to(self.one.weight.dtype)).to(x.dtype)
        return self.last(self.frozen(torch.relu(self.first(x))))


def train_awkward(size, dtype):
    def act(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.01, momentum=0.9, weight_decay=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(6, 6)).square().mean().backward()
            one_pass(model)
            optimizer.step()

    assert_as_pytorchs(lambda: Awkward(dtype), act, lambda net: DDP(net, size),
                       0.02 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("size, dtype", [
    (1e-6, torch.float64), (0.001, torch.float64), (25, torch.float32), (25, torch.bfloat16)])
def test_trains_as_pytorchs_own_does(world, size, dtype):
    ranks(train_awkward, size, dtype, world=world)


# --- as PyTorch's --------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, x, which):
        if which == "one":
            return self.one(x)
        if which == "two":
            return self.two(x)
        return self.two(self.one(x))


@case
def parameters_unused_by_all_by_one_rank_and_in_some_steps():
    def act(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for which in ("one", ("one", "two", "both")[dist.get_rank() % 3], "both", "two"):
            optimizer.zero_grad()
            model(torch.randn(4, 6), which).square().mean().backward()
            finish(model)
            optimizer.step()
    assert_as_pytorchs(Branches, act)


@case
def a_gradient_that_is_there_already_and_unused():
    def act(model):
        model.module.two.weight.grad = torch.ones(6, 6)
        model(torch.randn(4, 6), "one").sum().backward()
        finish(model)
    assert_as_pytorchs(Branches, act)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.b = nn.Linear(6, 3)

    def forward(self, x, scale=1):
        return {"a": self.a(x), "b": scale * self.b(x)}


@case
def outputs_in_a_dict_and_one_that_the_loss_leaves_out():
    def act(model):
        model(torch.randn(4, 6))  # a pass whose result nobody uses
        model(torch.randn(4, 6), scale=2)["b"].square().sum().backward()
        finish(model)
    assert_as_pytorchs(TwoOutputs, act)


@case
def two_forward_passes_in_one_loss():
    def act(model):
        (model(torch.randn(4, 6)).sum() + model(torch.randn(2, 6)).square().sum()).backward()
        finish(model)
    assert_as_pytorchs(mlp, act)


@case
def added_to_means_cleared_in_both_ways_and_on_one_rank_only():
    def act(model):
        one_pass(model)
        one_pass(model)
        for to_none in (False, True, dist.get_rank() == 0):
            model.zero_grad(set_to_none=to_none)
            one_pass(model)
    assert_as_pytorchs(mlp, act)


@case
def frozen_after_wrapping():
    def act(model):
        model.module[0].requires_grad_(False)
        two_steps(model)
    assert_as_pytorchs(mlp, act)


@case
def types_of_parameters():
    for dtype, tolerance in ((torch.float16, 0.02), (torch.complex64, 1e-4)):
        def act(model, dtype=dtype):
            model(torch.randn(4, 6).to(dtype)).abs().sum().backward()
            finish(model)
        assert_as_pytorchs(lambda dtype=dtype: nn.Linear(6, 3).to(dtype), act, tolerance=tolerance)


@case
def channels_last():
    def act(model):
        model(torch.randn(2, 3, 6, 6)).square().mean().backward()
        finish(model)
    assert_as_pytorchs(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), act)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


@case
def a_checkpoint_of_a_layer_used_twice():
    assert_as_pytorchs(lambda: Checkpointed(False), two_steps)


@case
def compiled():
    def act(model):
        torch.compile(model, backend="eager")(torch.randn(4, 6)).square().mean().backward()
        finish(model)
    assert_as_pytorchs(mlp, act)
    assert_as_pytorchs(lambda: torch.compile(mlp(), backend="eager"), two_steps)


@case
def an_optimizer_with_a_closure():
    def act(model):
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            finish(model)
            return loss
        optimizer.step(closure)
    assert_as_pytorchs(mlp, act)


# --- as one process that has all data ------------------------------------------------------------


def inside(model):
    return model.module if isinstance(model, DDP) else model


def loss_of(model, x):
    return model(x).square().mean()


def sgd_steps(model, x, loss_of=loss_of, change=lambda model: None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in x:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        finish(model)
        change(model)
        optimizer.step()


def assert_as_one_process(act, make=mlp):
    """Ours ends as one process on all data does, after `act(model, x)`."""
    k = dist.get_world_size()
    x = torch.randn(3, 4 * k, 6, generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(0)
    alone = make().double()
    torch.manual_seed(0)
    model = DDP(make().double())
    act(alone, x)
    act(model, x.chunk(k, dim=1)[dist.get_rank()])
    state = model.module.state_dict()
    for name, value in alone.state_dict().items():
        assert torch.allclose(value, state[name], 1e-9, 1e-12), name


@case
def losses_that_go_around_forward():
    def adversarial(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        return loss_of(model, x.detach() + 0.1 * slope.sign())

    def penalty(model, x):
        return loss_of(model, x) + 0.1 * sum(p.norm() for p in model.parameters())

    def layers(model, x):  # PyTorch's would send nothing, and say nothing
        return inside(model)[2](inside(model)[0](x)).square().mean()

    for loss in (adversarial, penalty, layers):
        assert_as_one_process(lambda model, x, loss=loss: sgd_steps(model, x, loss))


@case
def frozen_and_unfrozen_between_steps():
    def change(model):
        first = next(model.parameters())
        first.requires_grad_(not first.requires_grad)
    assert_as_one_process(lambda model, x: sgd_steps(model, x, change=change))


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.whole_number = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x):
        return (self.net(x) + self.none.sum()) * self.scalar * self.whole_number


@case
def parameters_without_entries_and_scalars():
    assert_as_one_process(sgd_steps, Sizes)


@case
def no_sync_around_the_forward_or_the_backward_only():
    def no_sync(model):
        return model.no_sync() if isinstance(model, DDP) else contextlib.nullcontext()

    def forward(model, x):
        with no_sync(model):
            loss = loss_of(model, x)
        return loss

    def backward_and_finish_inside(model, x):
        with no_sync(model):
            with no_sync(model):
                loss_of(model, x[0]).backward()
            loss_of(model, x[1]).backward()
            finish(model)
        torch.optim.SGD(model.parameters(), 0.1).step()

    assert_as_one_process(lambda model, x: sgd_steps(model, x, forward))
    assert_as_one_process(backward_and_finish_inside)


# --- its own -------------------------------------------------------------------------------------


def mean_over_ranks(value):
    mean = value / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@case
def a_derivative_of_a_gradient_is_averaged():  # by PyTorch's it isn't
    model = DDP(mlp())
    own = copy.deepcopy(model.module)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    x.requires_grad_()
    for net in (model, own):
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    finish(model)
    assert torch.allclose(mean_over_ranks(own[0].weight.grad), model.module[0].weight.grad)


@case
def large_gradients_do_not_overflow_on_the_way():
    model = DDP(nn.Linear(1, 1, bias=False).half())
    (model(torch.ones(1, 1).half()) * 40_000).sum().backward()  # float16 ends at 65,504
    finish(model)
    assert model.module.weight.grad.item() == 40_000


@case
def ranks_count_alike_and_keep_their_own_buffers():
    rank = dist.get_rank()
    model = DDP(nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)))
    model.eval()
    model(torch.ones(1 + rank, 1) * rank).mean().backward()
    finish(model)
    model.train()
    with torch.no_grad():
        model(torch.tensor([[1.0], [3.0]]) + rank)
    mean_rank = (dist.get_world_size() - 1) / 2
    assert abs(model.module[1].weight.grad.item() - mean_rank) < 1e-4
    assert abs(model.module[0].running_mean.item() - 0.1 * (2 + rank)) < 1e-6


@case
def buffers_of_all_types_are_rank_0s():
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.complex64, torch.bfloat16):
        net = nn.Linear(2, 2)
        net.register_buffer("kept", torch.ones(3).to(dtype) * (dist.get_rank() == 0))
        DDP(net)
        assert torch.equal(net.kept, torch.ones(3).to(dtype)), dtype


@case
def nothing_to_train():  # PyTorch's raises
    model = DDP(mlp().requires_grad_(False))
    model(torch.ones(2, 6))
    finish(model)
    assert all(p.grad is None for p in model.parameters())


@case
def inference_between_a_pass_and_its_end():
    model = DDP(mlp())
    model(torch.ones(1, 6)).sum().backward()
    model.eval()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            model(torch.ones(1, 6))
    finish(model)
    assert not model.module.training


@case
def finished_twice_and_dropped_after_no_sync():
    model = DDP(mlp())
    one_pass(model)
    before = [p.grad.clone() for p in model.parameters()]
    finish(model)
    assert all(torch.allclose(a, p.grad) for a, p in zip(before, model.parameters()))
    with model.no_sync():
        model(torch.ones(1, 6)).sum().backward()
    model.zero_grad()
    one_pass(model)


def clamp(p):
    p.grad.clamp_(max=1)


@case
def what_a_hook_before_wrapping_makes_of_a_gradient_is_sent():
    net = nn.Linear(2, 2)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    model = DDP(net)
    model(2.0 * dist.get_rank() * torch.ones(1, 2)).sum().backward()
    finish(model)
    k = dist.get_world_size()
    assert torch.allclose(net.weight.grad, torch.full((2, 2), (k - 1) / k))


@case
def the_module_can_be_copied_and_saved_and_names_are_pytorchs():
    model = DDP(mlp())
    assert list(model.state_dict()) == list(pytorchs(mlp()).state_dict())
    twin = copy.deepcopy(model.module)
    twin(torch.ones(1, 6)).sum().backward()
    assert not model.ready, "no hook of ours on the copy"
    pickle.loads(pickle.dumps(model.module))


@case
def wrapped_again_it_sends_once_and_the_old_one_is_freed():
    net = mlp()
    model = DDP(net)
    two_steps(model)
    seen = [weakref.ref(model), weakref.ref(model.guard)]
    model = DDP(net)
    assert all(each() is None for each in seen)
    model.zero_grad()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        one_pass(model)
    assert all_reduce.call_count == 1
    seen = [weakref.ref(net), weakref.ref(next(net.parameters()))]
    del model, net
    gc.collect()
    assert all(each() is None for each in seen)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_hard_case(case):
    for world in (2, 3):
        ranks(case, world=world)


# --- refused, with the reason or the way out -----------------------------------------------------


def backward(model):
    model(torch.ones(1, 6)).sum().backward()


@refused("was not called")
def a_step_after_no_sync_only():
    model = DDP(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    with model.no_sync():
        backward(model)
    optimizer.step()


@refused("was not called")
def a_step_in_a_hook():
    net = mlp()
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    backward(DDP(net))


@refused("was not called")
def a_step_with_a_closure_that_does_not_finish():
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step(lambda: backward(model))


@refused("was not called")
def no_sync_after_a_synchronised_pass():
    model = DDP(mlp())
    first, second = (model(torch.ones(2, 6)).sum() for _ in range(2))
    first.backward()
    with model.no_sync():
        second.backward()


@refused("was not called")
def two_backward_passes_of_one_forward():
    model = DDP(TwoOutputs())
    outputs = model(torch.ones(1, 6))
    (outputs["a"].sum() + outputs["b"].sum()).backward(retain_graph=True)
    outputs["a"].sum().backward()


@refused("Two DDPs")
def two_alive_of_one_module():
    net = mlp()
    first = DDP(net)
    second = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    one_pass(second)
    optimizer.step()
    del first


@refused("reentrant")
def a_reentrant_checkpoint_of_a_layer_used_twice():
    model = DDP(Checkpointed(True))
    model(torch.ones(1, 6, requires_grad=True)).sum().backward()


@refused("clip, scale or clear after")
def clipped_after_no_sync():
    model = DDP(mlp())
    with model.no_sync():
        backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    finish(model)


@refused("clip, scale or clear after")
def cleared_before_the_end():
    model = DDP(mlp())
    backward(model)
    model.zero_grad()
    finish(model)


@refused("clip, scale or clear after")
def replaced_before_the_end():
    model = DDP(mlp())
    backward(model)
    for p in model.parameters():
        p.grad = p.grad / 2
    finish(model)


@refused("clip, scale or clear after")
def changed_by_a_hook_after_wrapping():
    model = DDP(mlp())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    one_pass(model)


@refused("removed")
def cleared_in_an_earlier_hook():
    net = mlp()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    backward(DDP(net))


@refused("sparse=False")
def sparse_gradients():
    model = DDP(nn.Embedding(5, 3, sparse=True))
    model(torch.tensor([1, 2])).sum().backward()


@refused("torch.autograd.grad")
def create_graph():
    model = DDP(mlp())
    model(torch.ones(1, 6)).square().sum().backward(create_graph=True)


@refused("model.module")
def copied():
    copy.deepcopy(DDP(mlp()))


@refused("model.module")
def saved_whole():
    torch.save(DDP(mlp()), io.BytesIO())


@refused("wrap its")
def within_a_pytorchs():
    DDP(pytorchs(mlp()))


@refused("no values yet")
def lazy_parameters():
    DDP(nn.LazyLinear(3))


@refused("differ")
def another_order():
    names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    DDP(nn.ModuleDict({name: nn.Linear(3, 3) for name in names}))


@refused("differ")
def another_type():
    DDP(nn.Linear(3, 3).to(torch.float64 if dist.get_rank() else torch.float32))


@refused("bucket_size_mb")
def another_size_of_buckets():
    DDP(nn.Linear(3, 3), 1 + dist.get_rank())


@refused("bucket_size_mb=0: should be more than 0")
def buckets_of_no_size():
    DDP(nn.Linear(3, 3), 0)


def message_of(mistake):
    try:
        mistake()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("mistake, words", MISTAKES, ids=name_of)
def test_a_mistake_is_refused(mistake, words):
    for said in ranks(message_of, mistake, world=3):
        assert words in said


def leave_rank_0_alone():
    model = pytorchs(mlp())
    if dist.get_rank() == 0:
        backward(model)


def test_a_rank_that_waits_for_one_that_has_ended_gets_an_error():
    with pytest.raises(RuntimeError, match="gloo"):
        ranks(leave_rank_0_alone)


def test_ranks_that_take_too_long_are_ended():
    processes = ranks(os.getpid)
    with pytest.raises(TimeoutError, match="2 of 2 ranks still ran after 1 s"):
        ranks(time.sleep, 1000, seconds=1)
    assert not any(map(psutil.pid_exists, processes))


# --- the program ---------------------------------------------------------------------------------


def killed_in_epoch_2(arguments):
    """Start the program and kill all its processes once its first epoch is printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node=2", SCRIPT, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, env=environment)
    try:
        first = running.stdout.readline()
    finally:
        family = [*psutil.Process(running.pid).children(recursive=True), running]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        running.communicate()
    assert first.startswith("epoch 1: ")


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    two_epochs = ["--epochs", "2", "--snapshot"]
    printed = torchrun(SCRIPT, 2, arguments=[*two_epochs, whole], log=None, timeout=300)[0]
    assert float(printed.split("%")[-2].split()[-1]) > 80, "it learns the patterns that it makes"
    killed_in_epoch_2([*two_epochs, killed])
    assert torch.load(killed)["epochs"] == 1, "it was over before it was killed"
    resumed = ["--resume", "--snapshot", killed, "--epochs"]
    printed = torchrun(SCRIPT, 2, arguments=[*resumed, 2], log=None, timeout=300)[0]
    assert "epoch 1:" not in printed and "epoch 2:" in printed
    expected = torch.load(whole)["net"]
    found = torch.load(killed)["net"]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    (printed,) = torchrun(SCRIPT, 1, arguments=[*resumed, 1, "--batch-size", 128], log=None)
    assert "has 2 epochs already" in printed
    with pytest.raises(Failed, match="its steps had 128 images, these have 60"):
        torchrun(SCRIPT, 1, arguments=[*resumed, 3, "--batch-size", 60], log=None)


def test_a_kill_while_it_is_written_leaves_the_last_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    path = tmp_path / "snapshot.pt"
    ddp_train.save_snapshot(path, {"epochs": 1})

    def half(snapshot, path):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        ddp_train.save_snapshot(path, {"epochs": 2})
    assert torch.load(path) == {"epochs": 1}


@pytest.mark.parametrize("arguments, words", [
    (["--epochs", "0"], "--epochs 0: should be 1 or more"),
    (["--lr", "nan"], "--lr nan: should be more than 0"),
    (["--resume"], "say from where, by --snapshot FILE"),
    (["--resume", "--snapshot", "nowhere.pt"], "there is no nowhere.pt"),
    (None, "torchrun --standalone --nproc-per-node=2")])
def test_wrong_arguments_are_refused(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", *(arguments or [])])
    if arguments is not None:  # as torchrun would
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        ddp_train.read_arguments()
    assert words in capsys.readouterr().err
