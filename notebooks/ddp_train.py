"""Trains LeNet, a process for each device: torchrun --nproc-per-node=2 ddp_train.py --help"""

import argparse
import contextlib
import gzip
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


class Replicas(nn.Module):
    """Wraps `module`: all ranks begin with rank 0's parameters and buffers.

    Freeze, unfreeze or replace parameters before, not after, and on all ranks alike.
    """

    def __init__(self, module):
        super().__init__()
        self.module, self.world = module, dist.get_world_size()
        state = [*module.parameters(), *module.buffers()]
        kinds = [None] * self.world
        dist.all_gather_object(kinds, [(t.shape, t.dtype, t.requires_grad) for t in state])
        if any(each != kinds[0] for each in kinds):
            raise ValueError("the ranks' modules differ in their parameters or buffers")
        for tensor in state:
            whole = tensor.detach().contiguous()  # gloo takes memory as it lies
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)


def fill_buckets(parameters, most):
    """Lists of parameters of at most `most` bytes each, or of a single larger one."""
    buckets, latest, sizes = [], {}, {}
    for p in parameters:
        kind, size = (p.dtype, p.device), p.numel() * p.element_size()
        if kind not in latest or sizes[kind] + size > most:
            latest[kind], sizes[kind] = [], 0
            buckets.append(latest[kind])
        latest[kind].append(p)
        sizes[kind] += size
    return buckets


def flatten(bucket):
    """The gradients of a bucket in one array, then 1 for each that is there, 0 for None."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    used = torch.tensor([p.grad is not None for p in bucket]).to(parts[0])
    return torch.cat([*(part.flatten() for part in parts), used])


def write_back(bucket, buffer):
    """Replace the gradients of a bucket by what `buffer` has, where any rank had one."""
    *means, used = buffer.split([*(p.numel() for p in bucket), len(bucket)])
    for p, mean, users in zip(bucket, means, used):
        if p.grad is None and users != 0:
            p.grad = torch.zeros_like(p)
        if p.grad is not None:
            p.grad.copy_(mean.view_as(p))


class Bucketed(Replicas):
    """Averages dense gradients in buckets of `bucket_size_mb` MB (of 2**20 bytes)."""

    def __init__(self, module, bucket_size_mb=25):
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={bucket_size_mb}: should be more than 0")
        super().__init__(module)
        self.buckets = fill_buckets(reversed(self.trained), bucket_size_mb * 2**20)
        self.sent = []  # (buffer, its all-reduce) for each bucket sent, in order

    def message(self, bucket):
        return flatten(bucket)

    def all_reduce(self, buffer):
        return dist.all_reduce(buffer, async_op=True)

    def send_next(self):
        buffer = self.message(self.buckets[len(self.sent)]) / self.world  # before: no overflow
        self.sent.append((buffer, self.all_reduce(buffer)))

    def finish_gradient_synchronization(self):
        """To be called after the last backward pass of a step, before other messages."""
        while len(self.sent) < len(self.buckets):
            self.send_next()
        for bucket, (buffer, work) in zip(self.buckets, self.sent):
            work.wait()
            write_back(bucket, buffer)
        self.sent.clear()


class BucketedOverlapped(Bucketed):
    """Sends buckets while the backward pass goes on."""

    def __init__(self, module, bucket_size_mb=25):
        super().__init__(module, bucket_size_mb)
        self.ready = set()
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.mark_ready)

    def mark_ready(self, p):
        self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            self.send_next()

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.ready.clear()


UNFINISHED = ("finish_gradient_synchronization() was not called after the last backward pass; to "
              "add up several, run all but the last in no_sync()")


class DDP(BucketedOverlapped):
    """As DistributedDataParallel with find_unused_parameters=True, forward_sync_buffers=False."""

    synchronizing = True

    def forward(self, *inputs, **options):
        if self.ready and torch.is_grad_enabled():
            raise RuntimeError(UNFINISHED)
        return super().forward(*inputs, **options)

    def mark_ready(self, p):
        if p in self.ready:
            raise RuntimeError(UNFINISHED)
        if self.synchronizing:
            super().mark_ready(p)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in this block only add to the local gradients."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before


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
    """A dataset to train on, and images and labels to test on."""
    train, test = ([read_mnist(folder, part) for part in ("train", "t10k")] if folder is not None
                   else (make_data(6400, seed=1), make_data(1000, seed=2)))
    return torch.utils.data.TensorDataset(*train), test


def join():
    """Meets the other processes; returns this one's device."""
    here, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def train_epoch(model, optimizer, loader, device):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


@torch.no_grad()
def test_accuracy(model, images, labels, device):
    # Each image once: DistributedSampler would repeat some to make the shares equal.
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    counts = torch.zeros(2, device=device)  # right answers, answers
    for x, y in zip(images[mine].split(500), labels[mine].split(500)):
        right = model(x.to(device)).argmax(1) == y.to(device)
        counts += torch.stack([right.sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(data, epochs):
    device = join()
    torch.manual_seed(dist.get_rank())
    train, test = load(data)
    sampler = torch.utils.data.DistributedSampler(train)
    # 64 images on each rank: with more ranks, a step has more images.
    loader = torch.utils.data.DataLoader(train, batch_size=64, sampler=sampler)
    model = DDP(lenet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, loader, device)
        right = test_accuracy(model, *test, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {right:.1%} right, {dist.get_world_size()} x {device.type}")
    dist.destroy_process_group()


if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder with MNIST's four files; else data is made")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node=2 ddp_train.py")
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: should be 1 or more")
    main(options.data, options.epochs)
