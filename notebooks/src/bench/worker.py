"""One worker of `make bench`: a process that measures one thing each time it is told to.

Started by bench.py with a job as JSON. Once ready it says so in a line on its standard output, then
answers each line on its standard input with another: what it found, and its peak memory. Nothing of
the course is imported before it is known which of the engine's settings the job wants, and nothing
at all, nor MXNet, where it is PyTorch that is measured.
"""

import json
import os
import re
import resource
import statistics
import sys
import threading
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace


def lenet_scratch(job, x, y, steps):
    """Chapter 04's network and step."""
    import mxnet as mx
    from helpers import by_hand as ours

    devices = [mx.cpu(r) for r in range(job.k)]
    replicas = [ours.get_params(ours.init_params(), d) for d in devices]
    x, y = mx.nd.array(x[: job.batch]), mx.nd.array(y[: job.batch])

    def measure():
        start = time.perf_counter()
        for _ in range(steps):
            ours.train_batch(x, y, replicas, devices, 0.01)
        mx.nd.waitall()
        return steps * job.batch / (time.perf_counter() - start)

    return measure


def trainer(job, x, y, steps):
    """A Gluon network trained as the chapters do, by `helpers.training`."""
    import mxnet as mx
    from helpers.training import Batches, fit
    from mxnet import gluon, init
    from models import lenet_of
    from reproduce import network

    devices = [mx.cpu(r) for r in range(job.k)]
    net = lenet_of(*CHANNELS[job.model]) if job.model in CHANNELS else network(RESNETS[job.model])
    net.initialize(init.Xavier(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    batches = list(Batches(x[: job.batch], y[: job.batch], job.batch)) * steps
    return lambda: fit(net, trainer, batches, devices, progress=False).rate[0]


def torch_network(model):
    """The same network in PyTorch, its layers in the order of Gluon's; a test compares the two."""
    from torch import nn

    if model in CHANNELS:
        a, b = CHANNELS[model]
        return nn.Sequential(
            nn.Conv2d(1, a, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * b, 128), nn.ReLU(), nn.Linear(128, 10))

    class Residual(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(before, after, 3, stride, 1)
            self.conv2 = nn.Conv2d(after, after, 3, 1, 1)
            self.project = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()
            self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

        def forward(self, x):
            change = self.norm1(self.conv1(x)).relu()
            return (self.norm2(self.conv2(change)) + self.project(x)).relu()

    sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [Residual(*size) for a, b, s in sizes for size in ((a, b, s), (b, b, 1))]
    return nn.Sequential(nn.Conv2d(1, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def pytorch(job, x, y, steps):
    """PyTorch on as many threads as OMP_NUM_THREADS gives it; compiled before anybody measures."""
    import torch

    form = torch.channels_last if job.layout == "channels last" else torch.contiguous_format
    net = torch_network(job.model).to(memory_format=form)
    run = torch.compile(net) if job.compiled else net
    x = torch.from_numpy(x[: job.batch]).contiguous(memory_format=form)
    y = torch.from_numpy(y[: job.batch]).long()
    loss, sgd = torch.nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01)

    def measure():
        start = time.perf_counter()
        for _ in range(steps):
            sgd.zero_grad()
            loss(run(x), y).backward()
            sgd.step()
        return steps * job.batch / (time.perf_counter() - start)

    return measure


def limits(job, x, y, steps):
    """What the same cores reach in a large matrix product, GFLOP/s by library, and copying."""
    import mxnet as mx
    import numpy as np
    from helpers.engine import cores

    size = 2048 if steps > 1 else 256
    a, b = np.random.default_rng(0).random((2, size, size), dtype="float32")
    ma, mb = mx.nd.array(a), mx.nd.array(b)
    products = {"NumPy": lambda: a @ b, "MXNet": lambda: mx.nd.FullyConnected(
        ma, mb, no_bias=True, num_hidden=size).wait_to_read()}
    if find_spec("torch"):
        import torch

        torch.set_num_threads(cores())
        ta, tb = torch.from_numpy(a), torch.from_numpy(b)
        products["PyTorch"] = lambda: ta @ tb

    blocks = [np.ones((2, size * size), "float32") for _ in range(cores())]
    copies = [lambda b=b: np.copyto(b[0], b[1]) for b in blocks]

    def measure():
        found = {f"{name}, GFLOP/s": 2 * size**3 * steps / seconds(product, steps) / 1e9
                 for name, product in products.items()}
        copied = len(copies) * 4 * steps * blocks[0][0].nbytes
        return found | {"copy, GB/s": copied / side_by_side(copies, 4 * steps) / 1e9}

    return measure


def reduce(job, x, y, steps):
    """Summing 16 MB on two devices by chapter 03's ways and by the engine's, seconds each."""
    import mxnet as mx

    from helpers import schedules
    from helpers.parallel import allreduce

    def tree_allreduce(arrays):
        schedules.run(schedules.tree(job.k), arrays, num_chunks=1)

    def ring_allreduce(arrays):
        schedules.run(schedules.ring(job.k), arrays, num_chunks=job.k)

    count = 4 * 2**20 if steps > 1 else 4096
    arrays = [mx.nd.ones(count, ctx=mx.cpu(r)) for r in range(job.k)]
    store = mx.kv.create("device")
    store.init(0, arrays[0])

    def by(way):
        def run():
            way(arrays)
            mx.nd.waitall()
        return run

    ways = {way.__name__: by(way)
            for way in (allreduce, tree_allreduce, ring_allreduce)}
    ways["KVStore device"] = by(lambda a: store.pushpull(0, a, out=a))

    def measure():
        for array in arrays:
            array[:] = 0  # or 2 to the number of repetitions
        times = {way: [] for way in ways}
        for _ in range(10 * steps):
            for name, way in ways.items():
                times[name].append(seconds(way, 1))
        return {f"{way}, ms": 1e3 * statistics.median(t) for way, t in times.items()}

    return measure


def loaders(job, x, y, steps):
    """Chapter 06's ways of reading batches, images/s each, with no training."""
    import mxnet as mx
    from helpers.training import Batches
    from mxnet.gluon.data import ArrayDataset, DataLoader
    from mxnet.gluon.data.vision import transforms

    x, y = x[: 16 * steps * job.batch], y[: 16 * steps * job.batch]
    pictures = mx.nd.array((x * 255).round().transpose(0, 2, 3, 1), dtype="uint8")
    dataset = ArrayDataset(pictures, y)
    dataset = dataset.transform_first(transforms.ToTensor())
    iterator = mx.io.NDArrayIter(x, y, job.batch, shuffle=True)

    def from_iterator():
        iterator.reset()
        return (batch.data for batch in iterator)

    ways = {"NDArrayIter": from_iterator, "Batches": lambda: Batches(x, y, job.batch)}
    for workers in (0, 2):
        loader = DataLoader(dataset, job.batch, shuffle=True, num_workers=workers)
        ways[f"DataLoader, {workers} workers"] = lambda loader=loader: loader

    def read(way):
        for _ in ways[way]():
            pass
        mx.nd.waitall()

    return lambda: {f"{way}, images/s": len(x) / seconds(lambda way=way: read(way), 1)
                    for way in ways}


WORK = {"chapter 04": lenet_scratch, "Trainer": trainer, "PyTorch": pytorch, "limits": limits,
        "all-reduce": reduce, "loaders": loaders}
CHANNELS = {"LeNet": (20, 50), "LeNet of 16 and 48": (16, 48)}
# As reproduce.py calls them; PyTorch's is just "ResNet-18".
RESNETS = {"ResNet-18, hybridised": "resnet", "ResNet-18 of blocks": "resnet-plain"}


def seconds(work, times):
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


def side_by_side(jobs, times):
    """Seconds until each of the jobs, in a thread of its own, has been done so many times."""
    threads = [threading.Thread(target=seconds, args=(job, times)) for job in jobs]
    return seconds(lambda: [t.start() for t in threads] + [t.join() for t in threads], 1)


def main(job):
    """Make ready, say so, then measure once for each line that comes in."""
    answers = os.fdopen(os.dup(1), "w")  # for answers alone; whatever else is printed goes to 2
    os.dup2(2, 1)
    if not job.course and job.work != "PyTorch":
        import mxnet  # noqa: F401  loaded before helpers, it keeps the settings that it finds
        warnings.filterwarnings("ignore", "mxnet was imported before helpers")
    elif job.course:
        import helpers  # noqa: F401  makes the settings, before NumPy is loaded
    import numpy as np

    steps = 1 if job.quick else 12 if job.model in CHANNELS else 2
    with np.load(job.data) as data:
        measure = WORK[job.work](job, data["images"], data["labels"], steps)
    measure()  # the first time makes shapes known and memory grow
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:  # ends with the process that started us
        print(json.dumps({"found": measure(), "gib": peak_memory()}), file=answers, flush=True)


def peak_memory():
    """GiB that this program held at most."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    # Linux's ru_maxrss begins with what our parent held when it started us.
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(sys.argv[1])))
