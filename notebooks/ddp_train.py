"""Trains LeNet by data parallelism, a process for each device. --help lists the options.

    torchrun --standalone --nproc-per-node=2 ddp_train.py

`DDP`, which averages the gradients, can be used by itself: `from ddp_train import DDP`.
"""

import argparse
import contextlib
import gzip
import os
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# --- What DDP sends ------------------------------------------------------------------------------


def broadcast_module(module):
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        values = tensor.detach().contiguous()  # gloo sends only what is stored row by row
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values)


def fill_buckets(parameters, most):
    """Lists of parameters of one type: at most `most` bytes, or a single larger parameter."""
    buckets = []
    latest = {}  # for each type and device, the bucket that is being filled
    for p in parameters:
        kind = (p.dtype, p.device)
        filled = sum(other.nbytes for other in latest.get(kind, []))
        if kind not in latest or filled + p.nbytes > most:
            latest[kind] = []
            buckets.append(latest[kind])
        latest[kind].append(p)
    return buckets


def flatten(bucket):
    """The gradients of a bucket in one array; then, for each, 1 if it is there and 0 if not."""
    pieces = []
    flags = []
    for p in bucket:
        if p.grad is None:
            pieces.append(torch.zeros_like(p).flatten())
            flags.append(0)
        else:
            pieces.append(p.grad.flatten())
            flags.append(1)
    pieces.append(torch.tensor(flags).to(pieces[0]))  # to the type and device of the gradients
    return torch.cat(pieces)


def write_back(bucket, packed):
    """Copy the means in `packed`, made by `flatten`, into the gradients of a bucket.

    A gradient that no rank had stays None: its flag's mean is 0.
    """
    sizes = [p.numel() for p in bucket]
    sizes.append(len(bucket))
    pieces = packed.split(sizes)
    flags = pieces[-1]
    for p, mean, flag in zip(bucket, pieces, flags):
        if p.grad is None and flag != 0:  # another rank has one
            p.grad = torch.zeros_like(p)
        if p.grad is not None:
            p.grad.copy_(mean.view_as(p))


# --- DDP -----------------------------------------------------------------------------------------


class DDP(nn.Module):
    """Averages gradients over all ranks, in buckets, during the backward pass.

    A step: forward, backward, finish_gradient_synchronization(); then unscale, clip, step. Of
    several backward passes in a step, run all but the last in no_sync().

    module: on every rank it gets rank 0's parameters and buffers; buffers are sent this once.
    bucket_size_mb: at most so many MB of 2**20 bytes in an all-reduce, or one larger gradient.

    A rank without a gradient counts as zeros, and what no rank has stays None, as in PyTorch's with
    find_unused_parameters=True. Ranks count alike, however many examples each has. Unlike PyTorch's
    it averages after model.module(x), too. It has no communication hooks and no join. What
    torch.autograd.grad() returns stays the rank's own.

    Refused, by an error that says what to do:
    - a step, a forward or second backward pass, or changed gradients, before the synchronization
    - parameters unfrozen, added or replaced after DDP was made; lazy or meta ones
    - modules or bucket sizes that differ between the ranks
    - sparse gradients; backward(create_graph=True); a reentrant checkpoint of a layer used twice
    - a DDP in a DDP or two of one module; copying or saving a DDP

    It doesn't notice if one rank alone loads or changes weights or takes a step more, nor if
    anything else is sent between the backward pass and its finish.
    """

    def __init__(self, module, bucket_size_mb=25):
        super().__init__()
        check_module(module, bucket_size_mb)
        broadcast_module(module)
        self.module = module
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = fill_buckets(reversed(self.trained), bucket_size_mb * 2**20)
        self.ready = set()  # parameters whose gradients have come
        self.sent = []  # for each bucket that has left: its packed gradients, and what to wait for
        self.synchronizing = True  # False in no_sync()
        self.guard = Guard(self.trained)
        set_hooks(self.trained, self.mark_ready)

    def forward(self, *inputs, **options):
        self.guard.before_forward(self.module, self.ready)
        return self.module(*inputs, **options)

    def mark_ready(self, p):
        """Called when the gradient of `p` is complete: send each bucket that is, in their order."""
        if p in self.ready:
            raise RuntimeError(UNFINISHED)
        self.guard.note(p)
        if not self.synchronizing:
            return
        self.ready.add(p)
        while len(self.sent) < len(self.buckets):
            next_bucket = self.buckets[len(self.sent)]  # the first that hasn't left
            if not self.ready.issuperset(next_bucket):
                break  # a gradient of it is missing
            self.send(next_bucket)

    def send(self, bucket):
        """Begin the all-reduce of a bucket; what is appended to `sent` can be waited for."""
        packed = flatten(bucket) / dist.get_world_size()  # first: a sum could overflow
        work = dist.all_reduce(packed, async_op=True)
        self.sent.append((packed, work))

    def finish_gradient_synchronization(self):
        """Send what is left, wait, and put the means into the gradients."""
        self.guard.before_averaging(self.ready)
        while len(self.sent) < len(self.buckets):
            next_bucket = self.buckets[len(self.sent)]
            self.send(next_bucket)
        for bucket, (packed, work) in zip(self.buckets, self.sent):
            work.wait()
            write_back(bucket, packed)
        self.sent.clear()
        self.ready.clear()

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in this block only add to the rank's own gradients."""
        before = self.synchronizing
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = before

    def __getstate__(self):
        raise TypeError(COPIED)


def set_hooks(parameters, method):
    """Have `method(p)` called when the gradient of p is complete, as long as its object lives."""
    weak = weakref.WeakMethod(method)  # the method itself would keep its object alive for ever
    for p in parameters:
        hook = p.register_post_accumulate_grad_hook(lambda p: weak()(p))
        weakref.finalize(method.__self__, hook.remove)


# --- What DDP refuses, each with its reason and the way out --------------------------------------

UNFINISHED = ("finish_gradient_synchronization() was not called after the last backward pass; to "
              "add up several, run all but the last in no_sync(). (Two DDPs of one module, or a "
              "reentrant checkpoint of a layer used twice, end here too.)")
CHANGED = ("a gradient was changed or removed after the backward pass and before its mean was "
           "there: clip, scale or clear after finish_gradient_synchronization()")
NEW = ("a parameter was unfrozen, added or replaced after DDP was made: its gradient would stay "
       "this rank's own. Do it before, or make DDP(model.module) anew")
SPARSE = "a sparse gradient can't be averaged here: make it dense, Embedding(..., sparse=False)"
GRAPH = ("backward(create_graph=True) can't be averaged: for a derivative of a gradient call "
         "torch.autograd.grad(..., create_graph=True), then backward()")
COPIED = "a DDP can't be copied or saved, its module can: copy or save model.module"


def check_module(module, bucket_size_mb):
    """Raise ValueError unless all ranks can wrap their `module`."""
    if not bucket_size_mb > 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb}: should be more than 0")
    for part in module.modules():
        if isinstance(part, DDP | nn.parallel.DistributedDataParallel):
            raise ValueError("module is a DDP already, or has one in it: wrap its .module")
    kinds = [bucket_size_mb]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no values yet: initialise it before DDP is made")
        kinds.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    on_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(on_ranks, kinds)
    if any(each != kinds for each in on_ranks):
        raise ValueError("the ranks' modules differ in their parameters or buffers, or the ranks "
                         "in bucket_size_mb")


class Guard:
    """Notices when gradients are used, changed or missed before all ranks have their mean.

    Each of these would leave wrong numbers, and no error: RuntimeError says which, and what to do.
    """

    def __init__(self, parameters):
        self.parameters = set(parameters)
        self.came = {}  # parameter: its gradient when it came, and how often changed by then
        # PyTorch calls these hooks at each step of any optimizer: before it, and after it, since a
        # closure runs its backward pass within the step. They end with this object.
        before_step = weakref.WeakMethod(self.before_step)
        for register in register_optimizer_step_pre_hook, register_optimizer_step_post_hook:
            hook = register(lambda optimizer, *_: before_step()(optimizer))
            weakref.finalize(self, hook.remove)

    def note(self, p):
        """Remember the gradient of `p`, which has just come; TypeError where it is sparse."""
        if p.grad is None:
            raise RuntimeError(CHANGED)
        if p.grad.layout != torch.strided:
            raise TypeError(SPARSE)
        if p.grad.requires_grad:
            raise RuntimeError(GRAPH)
        self.came[p] = (p.grad, p.grad._version)

    def before_forward(self, module, ready):
        """Refuse a training pass before the last one's end, or with parameters that are new."""
        if not torch.is_grad_enabled():
            return
        if ready:
            raise RuntimeError(UNFINISHED)
        for p in module.parameters():
            if p.requires_grad and p not in self.parameters:
                raise RuntimeError(NEW)

    def before_averaging(self, ready):
        """Refuse gradients that aren't what came."""
        for p, (gradient, version) in self.came.items():
            if p.grad is None and p not in ready:
                continue  # dropped after no_sync, and nothing of it was sent
            if p.grad is not gradient or gradient._version != version:
                raise RuntimeError(CHANGED)
        self.came.clear()

    def before_step(self, optimizer):
        """Refuse a step with gradients that have come, and aren't means yet."""
        in_backward = torch._C._current_graph_task_id() != -1  # a hook that calls step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in self.parameters and in_backward or p in self.came and p.grad is not None:
                    raise RuntimeError(UNFINISHED)


# --- The network and its data --------------------------------------------------------------------


def lenet():
    """LeNet for images [n, 1, 28, 28]; it gives scores [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


def read_mnist(folder, part):
    """Images [n, 1, 28, 28] and labels [n] from MNIST's own files, `part` "train" or "t10k"."""
    arrays = []
    for name, header in (("images-idx3", 16), ("labels-idx1", 8)):
        with gzip.open(os.path.join(folder, f"{part}-{name}-ubyte.gz")) as file:
            arrays.append(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header:])
    return arrays[0].view(-1, 1, 28, 28) / 255 - 0.13, arrays[1].long()


def make_data(n, seed):
    """The same shapes without files: ten patterns under noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=source)
    return patterns[labels] + torch.randn(n, 1, 28, 28, generator=source), labels


def load(folder):
    """A dataset to train on, and images and labels to test on; made where `folder` is None."""
    if folder is None:
        train = make_data(6400, seed=1)
        test = make_data(1000, seed=2)
    else:
        train = read_mnist(folder, "train")
        test = read_mnist(folder, "t10k")
    return torch.utils.data.TensorDataset(*train), test


# --- Training and testing ------------------------------------------------------------------------


def join_processes():
    """Meet the other processes, on GPUs if there is one for each, else on CPU cores.

    Returns this process's device.
    """
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def train_epoch(model, optimizer, loader, device):
    """Take a step with each batch of `loader`, which has this rank's images."""
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        if isinstance(model, DDP):  # PyTorch's has finished within backward()
            model.finish_gradient_synchronization()
        optimizer.step()


@torch.no_grad()
def count_right(model, images, labels, device):
    """How many of these images the model gets right, as a tensor."""
    model.eval()
    right = torch.zeros((), device=device)
    for x, y in zip(images.split(500), labels.split(500)):
        right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    return right


def test_accuracy(model, images, labels, device):
    """The share of images that the model gets right.

    Each rank takes every k-th image, each image once, and the counts are added.
    """
    rank = dist.get_rank()
    k = dist.get_world_size()
    right = count_right(model, images[rank::k], labels[rank::k], device)
    dist.all_reduce(right)
    return right.item() / len(images)


# --- A snapshot after each epoch, from which a run goes on ---------------------------------------


def save_snapshot(path, snapshot):
    """Rank 0 writes it beside `path` and then renames it: whoever kills us, `path` is whole."""
    if dist.get_rank() == 0:
        torch.save(snapshot, f"{path}.part")
        os.replace(f"{path}.part", path)


def read_snapshot(path, device):
    """What rank 0 reads from its disk, on all ranks."""
    box = [None]
    if dist.get_rank() == 0:
        box = [torch.load(path, map_location="cpu")]
    dist.broadcast_object_list(box, device=device)
    return box[0]


def resume_from(path, net, optimizer, images_a_step, device):
    """Put the snapshot's state into `net` and `optimizer`; returns how many epochs it has.

    The learning rate stays the optimizer's. SystemExit where a step had another number of images.
    """
    saved = read_snapshot(path, device)
    if saved["a step"] != images_a_step:
        raise SystemExit(f"{path}: its steps had {saved['a step']} images, these have "
                         f"{images_a_step}; choose --batch-size for as many processes")
    lr = optimizer.param_groups[0]["lr"]
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.param_groups[0]["lr"] = lr
    return saved["epochs"]


# --- The program ---------------------------------------------------------------------------------


def main(data, epochs, batch_size, lr, snapshot, resume):
    """Train as one of the processes that torchrun started; the arguments are the options'."""
    device = join_processes()
    rank = dist.get_rank()
    world = dist.get_world_size()
    train, test = load(data)
    sampler = torch.utils.data.DistributedSampler(train)
    loader = torch.utils.data.DataLoader(train, batch_size, sampler=sampler)
    torch.manual_seed(rank)
    net = lenet().to(device)
    model = DDP(net)  # or PyTorch's own: nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    images_a_step = batch_size * world
    first = 0
    if resume:
        first = resume_from(snapshot, net, optimizer, images_a_step, device)
    if first >= epochs and rank == 0:
        print(f"{snapshot} has {first} epochs already: --epochs {epochs} adds none")
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        # A seed for each epoch and rank: a resumed run needs no state of random numbers.
        torch.manual_seed(1000 * epoch + rank)
        train_epoch(model, optimizer, loader, device)
        right = test_accuracy(model, *test, device)
        if snapshot is not None:
            save_snapshot(snapshot, {
                "epochs": epoch + 1, "net": net.state_dict(), "a step": images_a_step,
                "optimizer": optimizer.state_dict()})
        if rank == 0:
            print(f"epoch {epoch + 1}: {right:.1%} right, {world} x {device.type}", flush=True)
    dist.destroy_process_group()


def read_arguments():
    """The command line's options; what can't be right ends the program with a line that says so."""
    parser = argparse.ArgumentParser(description="Trains LeNet, a process for each device.")
    parser.add_argument("--data", help="folder with MNIST's four files; else data is made")
    parser.add_argument("--epochs", type=int, default=3, help="in all, resumed ones too")
    parser.add_argument("--batch-size", type=int, default=64, help="images on each process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--snapshot", metavar="FILE", help="written after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from --snapshot's FILE")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --standalone --nproc-per-node=2 ddp_train.py")
    for name in ("epochs", "batch_size"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: should be 1 or more")
    if not options.lr > 0:
        parser.error(f"--lr {options.lr}: should be more than 0")
    if options.resume and options.snapshot is None:
        parser.error("--resume: say from where, by --snapshot FILE")
    if options.resume and os.environ["RANK"] == "0" and not os.path.exists(options.snapshot):
        parser.error(f"--resume: there is no {options.snapshot}; start without --resume")
    return options


if __name__ == "__main__":
    main(**vars(read_arguments()))
