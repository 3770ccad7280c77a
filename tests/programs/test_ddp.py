"""notebooks/ddp_train.py on two ranks: against PyTorch's own DDP, and against one process.

Last comes notebooks/ranks.py, which runs it here. Hard cases, on one to four ranks, are in
tests/tools/test_ddp_hard.py.
"""

import contextlib
import gzip
import re
import time
from importlib import import_module
from pathlib import Path
from unittest import mock

from helpers.cluster import torchrun

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ddp_train = import_module("ddp_train")
ranks = import_module("ranks").ranks
dist = torch.distributed
nn = torch.nn
DDP = ddp_train.DDP
SCRIPT = Path(__file__).resolve().parents[2] / "notebooks/ddp_train.py"


class Awkward(nn.Module):
    """Tied, frozen and unused parameters, two types, buffers; rank 0 alone uses `one`."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(8, 8)
        self.one = nn.Linear(8, 8)
        self.stem = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 8).double()
        self.last = nn.Linear(8, 8).double()
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).double().requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.stem(x))
        if dist.get_rank() == 0:
            x = self.one(x)
        x = torch.relu(self.first(x.double()))
        return self.last(self.frozen(x))


def pytorchs(net):
    return nn.parallel.DistributedDataParallel(
        net, find_unused_parameters=True, forward_sync_buffers=False)


def ours(net):
    return DDP(net)


def ours_in_small_buckets(net):
    return DDP(net, 1e-6)


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def finish(model):
    if isinstance(model, DDP):
        model.finish_gradient_synchronization()


def train_awkward(wrap):
    """Four steps of two passes each; gradients and state at the end."""
    torch.manual_seed(dist.get_rank())  # each rank begins with other weights
    model = wrap(Awkward())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    torch.manual_seed(100 + dist.get_rank())  # and has other data
    for _ in range(4):
        optimizer.zero_grad()
        for block in (model.no_sync(), contextlib.nullcontext()):
            with block:
                model(torch.randn(4, 6)).square().mean().backward()
        finish(model)
        optimizer.step()
    return [p.grad for p in model.parameters()], list(model.state_dict().values())


@pytest.mark.parametrize("wrap", [ours, ours_in_small_buckets])
def test_trains_as_pytorchs_own_does(wrap):
    on_both = zip(ranks(train_awkward, wrap), ranks(train_awkward, pytorchs))
    for (gradients, state), (their_gradients, their_state) in on_both:
        for found, expected in zip(gradients, their_gradients, strict=True):
            assert (found is None) == (expected is None)
            assert found is None or torch.allclose(found, expected, 1e-4, 1e-6)
        for found, expected in zip(state, their_state, strict=True):
            assert torch.allclose(found, expected, 1e-4, 1e-6)


def steps(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in x:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish(model)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def steps_on_half(x, late):
    """The steps with this rank's half of each batch; rank 1 comes `late` seconds later."""
    torch.manual_seed(dist.get_rank())
    net = mlp()
    model = DDP(net)
    if dist.get_rank() == 1:
        net.register_forward_hook(lambda *_: time.sleep(late))
    return steps(model, x.chunk(2, dim=1)[dist.get_rank()])


def test_trains_as_one_process_does_even_if_a_rank_is_late():
    torch.manual_seed(0)
    net = mlp()  # rank 0's
    x = torch.randn(3, 8, 6).double()
    expected = steps(net, x)
    for found in ranks(steps_on_half, x, 0.2):
        assert all(torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(found, expected, strict=True))


def begin():
    torch.manual_seed(dist.get_rank())
    net = nn.BatchNorm1d(3)
    net.running_mean += dist.get_rank()
    net.weight.data = torch.randn(6)[::2]
    net.register_buffer("every_other", torch.arange(6)[dist.get_rank()::2])
    before = [value.clone() for value in net.state_dict().values()]
    DDP(net)
    return before, list(net.state_dict().values())


def test_all_ranks_begin_with_the_parameters_and_buffers_of_rank_0():
    (wanted, on_rank_0), (other, on_rank_1) = ranks(begin)
    assert not torch.equal(wanted[0], other[0])
    for expected, *found in zip(wanted, on_rank_0, on_rank_1, strict=True):
        assert all(torch.equal(each, expected) for each in found)


def sent_when():
    """How many messages have been sent after a pass in no_sync, and after a synchronised one."""
    model = DDP(mlp(), 1e-6)
    x = torch.ones(2, 6).double() * (1 + dist.get_rank())
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        with model.no_sync():
            model(x).sum().backward()
        in_no_sync = all_reduce.call_count
        own = model.module[0].weight.grad.clone()
        model(x).sum().backward()
        in_backward = all_reduce.call_count
    model.finish_gradient_synchronization()
    return in_no_sync, in_backward, own, model.module[0].weight.grad


def test_no_sync_sends_nothing_and_the_next_pass_sends_each_bucket_before_it_ends():
    (none, four, own_0, mean_0), (_, _, own_1, mean_1) = ranks(sent_when)
    assert (none, four) == (0, 4)
    assert not torch.allclose(own_0, own_1), "in no_sync each has its own"
    for mean in (mean_0, mean_1):
        assert torch.allclose(mean, own_0 + own_1), "the mean of twice each"


# --- what would be wrong in silence, or wait for ever --------------------------------------------


def backward(model):
    model(torch.ones(1, 6).double()).sum().backward()


def a_step_before_the_end(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()


def a_second_pass(model):
    backward(model)
    backward(model)


def a_pass_that_broke_off(model):
    hook = model.module[2].weight.register_post_accumulate_grad_hook(lambda p: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        backward(model)
    hook.remove()
    backward(model)


def clipping_before_the_end(model):
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.finish_gradient_synchronization()


def a_layer_added(model):
    model.module.append(nn.Linear(3, 3).double())
    backward(model)


def a_ddp_of_a_ddp(model):
    DDP(model)


def other_shapes(model):
    DDP(nn.Linear(3, 3 + dist.get_rank()))


def frozen_on_one_rank(model):
    DDP(mlp().requires_grad_(dist.get_rank() == 0))


def refusal(mistake):
    try:
        mistake(DDP(mlp()))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("mistake, words", [
    (a_step_before_the_end, "finish_gradient_synchronization() was not called"),
    (a_second_pass, "run all but the last in no_sync()"),
    (a_pass_that_broke_off, "finish_gradient_synchronization() was not called"),
    (clipping_before_the_end, "clip, scale or clear after"),
    (a_layer_added, "added"), (a_ddp_of_a_ddp, "wrap its .module"),
    (other_shapes, "modules differ"), (frozen_on_one_rank, "modules differ")])
def test_what_would_be_wrong_in_silence_is_refused(mistake, words):
    for said in ranks(refusal, mistake):
        assert words in said


def test_a_bucket_has_one_type_and_at_most_its_size():
    sizes = [(3, "float32"), (1, "float32"), (9, "float64"), (4, "float32"), (1, "float64")]
    parameters = [nn.Parameter(torch.zeros(n, dtype=getattr(torch, t))) for n, t in sizes]
    place = {p: i for i, p in enumerate(parameters)}
    found = [[place[p] for p in bucket] for bucket in ddp_train.fill_buckets(parameters, 20)]
    assert found == [[0, 1], [2], [3], [4]], "16 bytes; 72 alone; 16 more don't fit; 8"


# --- the program ---------------------------------------------------------------------------------


def write_mnist(folder, part, n):
    """`n` made images in MNIST's own format; what they are, prepared as the program does it."""
    rng = np.random.default_rng(n)
    images = rng.integers(0, 256, (n, 28, 28), dtype="uint8")
    labels = rng.integers(0, 10, n, dtype="uint8")
    for name, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        with gzip.open(folder / f"{part}-{name}-ubyte.gz", "wb") as file:
            file.write(bytes(header) + array.tobytes())
    x = images[:, None] / np.float32(255) - np.float32(0.13)
    return torch.tensor(x), torch.tensor(labels, dtype=torch.int64)


def test_two_processes_train_as_one_on_the_files_of_mnist(tmp_path):
    images, labels = write_mnist(tmp_path, "train", 96)
    test_images, test_labels = write_mnist(tmp_path, "t10k", 41)
    printed, other = torchrun(SCRIPT, 2, log=None, arguments=[
        "--data", tmp_path, "--epochs", 2, "--batch-size", 16, "--snapshot", tmp_path / "net.pt"])

    torch.manual_seed(0)  # rank 0's weights
    net = ddp_train.lenet()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    expected = []
    for epoch in range(2):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
        expected.append((net(test_images).argmax(1) == test_labels).double().mean().item())

    weights = torch.load(tmp_path / "net.pt")["net"]
    for name, value in net.state_dict().items():
        assert torch.allclose(weights[name], value, 1e-3, 1e-5), name
    assert re.findall(r"(\S+)% right, 2 x cpu", printed) == [f"{100 * e:.1f}" for e in expected]
    assert other == "", "rank 0 speaks for all"


# --- ranks, last: its error ends all processes, and a call after it would start new ones ---------


def power_of_rank(exponent):
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank() ** exponent, total.item()


def test_each_rank_runs_the_function_and_results_are_in_their_order():
    assert ranks(power_of_rank, 2, world=3) == [(0, 3), (1, 3), (4, 3)]
    assert ranks(power_of_rank, 1) == [(0, 1), (1, 1)]


def place_of_a_new_tensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import zeros

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torch.zeros_like(zeros(2, device_mesh=mesh)).device_mesh.get_coordinate()[0]


def test_a_process_forgets_the_rank_that_it_had():
    for _ in range(6):  # a process gets either rank
        assert ranks(place_of_a_new_tensor) == [0, 1]


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ConnectionError("Connection refused: the cause")
    dist.all_reduce(torch.ones(1))


def test_the_error_of_a_rank_is_raised_and_not_what_it_causes_on_another():
    with pytest.raises(ConnectionError, match="Connection refused: the cause"):
        ranks(fail_on_rank_1, world=4)  # three that wait, and one cause
