"""The training loop that the chapters from 06 on share.

It is chapter 06's own loop with what a long run needs besides: a progress bar, an end at the first
loss that is not a number, and an interrupt that leaves no step half done. It works on `mx.nd`
arrays and, after `npx.set_np()`, on `mx.np` ones.
"""

import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from tqdm import tqdm

from helpers.parallel import assert_replicas_equal, check_devices, split_and_load

# The loop reads losses of some steps ago. The newest would make the devices wait for Python; none
# at all would let thousands of steps pile up in the engine's queues. It reads in bursts: when MOST
# steps are queued, or what is queued takes longer than QUEUED seconds, it reads until AHEAD are
# left. Where devices are cores, Python takes less from them if it wakes up less often: with bursts
# of 16, two devices at batch 64 went from 1.44 to 1.59 times one.
AHEAD, MOST, QUEUED = 2, 32, 1.0


class Batches:
    """The batches of a data set in memory, `(x, y)` NDArrays on `cpu(0)`; one pass is an epoch.

    images: `[n, ...]`, labels: `[n]`, NumPy arrays or NDArrays; size: examples a batch. The last
    batch holds what is left. With `shuffle=True` each pass has an order of its own, and the same
    seed gives the same orders in every run. Raises ValueError where lengths or size don't fit.
    """

    def __init__(self, images, labels, size, shuffle=True, seed=0):
        if len(images) != len(labels):
            raise ValueError(f"Batches(images, labels): {len(images)} images but {len(labels)} "
                             "labels; each image needs one")
        if size < 1 or not len(images):
            raise ValueError(f"Batches(size={size}) of {len(images)} images: needs at least one "
                             "image, and at least one a batch")
        self.images, self.labels = (_nd(a).as_in_context(mx.cpu(0)) for a in (images, labels))
        self.size, self.shuffle, self.seed, self.epoch = size, shuffle, seed, 0

    def __len__(self):
        return -(-len(self.labels) // self.size)

    def __iter__(self):
        order = np.arange(len(self.labels))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
            self.epoch += 1
        order = mx.nd.array(order, ctx=mx.cpu(0), dtype="int32")
        for start in range(0, len(self.labels), self.size):
            chosen = order[start : start + self.size]
            batch = self.images.take(chosen), self.labels.take(chosen)
            if mx.util.is_np_array():
                batch = tuple(a.as_np_ndarray() for a in batch)
            yield batch


@dataclass
class History:
    """What `fit` saw: a loss for each step, the mean over its batch; the others for each epoch."""

    losses: list = field(default_factory=list)
    train_accuracy: list = field(default_factory=list)  # while the weights were changing
    test_accuracy: list = field(default_factory=list)  # where `test` was given
    seconds: list = field(default_factory=list)  # training only
    rate: list = field(default_factory=list)  # images/s


def fit(net, trainer, batches, devices, epochs=1, test=None, loss=None, progress=True, title=""):
    """Train `net` on all `devices` at once; returns a `History`.

    net: initialised on just these devices; trainer: a `gluon.Trainer` of its parameters;
    batches: an iterable that gives an epoch of `(x, y)` each time, such as `Batches` or a
    `gluon.data.DataLoader`; test: one more, for the accuracy after each epoch; loss: gives a
    number for each example, softmax cross-entropy by default.

    Each step uses the whole batch, also a last one that is smaller or doesn't divide: a device for
    which nothing is left takes part with gradients of zero, or its old ones would count once more.

    Raises ValueError where net and devices don't fit; FloatingPointError with the step's number
    (from 0) at a loss that is not finite, or at an epoch's end at a weight that isn't; and
    AssertionError where replicas are no longer equal then. An interrupt (Ctrl-C) takes effect when
    the step that Python is in has ended; then the replicas are equal, which is asserted, and
    training can go on from there.
    """
    _check("fit", net, devices)
    loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
    history, context = History(), mx.context.current_context()
    try:
        for epoch in range(epochs):
            name = title if title and epochs == 1 else f"{title} epoch {epoch + 1}/{epochs}".strip()
            with _whole():  # the bar as well: it has locks, which nobody would open again
                bar = tqdm(batches, name, disable=not progress, file=sys.stdout, ncols=79,
                           leave=False)
            try:
                _epoch(net, trainer, loss, batches, devices, history, bar)
            finally:
                with _whole():
                    bar.close()
            _assert_finite(net, epoch)
            assert_same_parameters(net)
            if test is not None:
                history.test_accuracy.append(accuracy(net, test, devices))
    except KeyboardInterrupt:
        # One that hits MXNet's own `with context:` as it ends would leave that context current.
        mx.Context._default_ctx.value = context
        mx.nd.waitall()
        with suppress(gluon.parameter.DeferredInitializationError):  # not one step yet
            assert_same_parameters(net)
        raise KeyboardInterrupt("training stopped between two steps: the replicas are equal, and "
                                "it can go on from here") from None  # where it was is no news
    return history


def _epoch(net, trainer, loss, batches, devices, history, bar):
    pending, right, seen, done, start = [], 0, 0, 0, time.perf_counter()

    def settle(left):
        nonlocal right, done
        while len(pending) > left:
            with _whole():
                value, hits = _read(pending.pop(0))
                if not np.isfinite(value):
                    raise FloatingPointError(f"the loss is {value} at step {len(history.losses)}: "
                                             "broken data, or too high a learning rate?")
                history.losses.append(value)
                right, done = right + hits, done + 1
                bar.set_postfix_str(f"loss {value:.3f}", refresh=False)
                bar.update()

    for x, y in batches:
        with _whole():
            pending.append(_step(net, trainer, loss, x, y, devices))
            seen += len(x)
        at_once = done / (time.perf_counter() - start) * QUEUED  # steps in so many seconds
        if len(pending) >= min(MOST, at_once):
            settle(AHEAD)
    settle(0)
    mx.nd.waitall()
    if not seen:
        raise ValueError("fit(batches): gave no batch; an iterator that was used up needs a reset")
    history.seconds.append(time.perf_counter() - start)
    history.rate.append(seen / history.seconds[-1])
    history.train_accuracy.append(right / seen)


def _step(net, trainer, loss, x, y, devices):
    used, idle = devices[: len(x)], devices[len(x) :]
    shards = list(zip(*(split_and_load(a, used, even=False) for a in (x, y))))
    with autograd.record():
        outputs = [net(x) for x, _ in shards]
        losses = [loss(out, y) for out, (_, y) in zip(outputs, shards)]
        zeros = [(p.data(device) * 0).sum() for device in idle for p in _trainable(net)]
    autograd.backward(losses + zeros)
    trainer.step(len(x))
    return losses, [(out, y) for out, (_, y) in zip(outputs, shards)]


def _read(step):
    """The mean loss and the number of right answers of a step; waits for them."""
    losses, answers = step
    losses = np.concatenate([a.asnumpy() for a in losses]).astype("float64")
    return losses.mean(), _hits(answers)


def _hits(answers):
    # By NumPy: each operator on a device would cost Python more time than the counting takes.
    return sum(int((out.asnumpy().argmax(axis=1) == y.asnumpy()).sum()) for out, y in answers)


def accuracy(net, batches, devices):
    """The share of right answers, 0 to 1; each device answers for its shard of each batch.

    Where layers keep statistics a device (BatchNorm), each shard is judged with its device's own.
    Raises ValueError where net and devices don't fit, or where `batches` gives nothing.
    """
    _check("accuracy", net, devices)
    pending, right, seen = [], 0, 0
    for x, y in batches:
        shards = zip(*(split_and_load(a, devices[: len(x)], even=False) for a in (x, y)))
        pending.append([(net(x), y) for x, y in shards])
        seen += len(x)
        if len(pending) > AHEAD:
            right += _hits(pending.pop(0))
    if not seen:
        raise ValueError("accuracy(batches): gave no batch; one that was used up needs a reset")
    return (right + sum(_hits(answers) for answers in pending)) / seen


def assert_same_parameters(net, tolerance=0.0):
    """Assert that each trainable parameter is equal on all of its devices.

    tolerance: the largest difference allowed, as a share of the parameter's largest entry. Raises
    AssertionError that names the parameter and the device. Running statistics are left out: each
    device has its own.
    """
    for parameter in _trainable(net):
        try:
            assert_replicas_equal([_nd(a) for a in parameter.list_data()], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{parameter.name}: {error}") from None


def _assert_finite(net, epoch):
    for parameter in _trainable(net):
        if not np.isfinite(parameter.list_data()[0].asnumpy()).all():
            raise FloatingPointError(
                f"{parameter.name} has entries that are not finite at the end of epoch "
                f"{epoch + 1}, though the loss was: a layer has made 0 of a NaN. Broken data?")


def _trainable(net):
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


@contextmanager
def _whole():
    """Hold an interrupt back until the block has ended, so that nothing is done by halves."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers interrupts to the main thread only
        return
    held = []
    previous = signal.signal(signal.SIGINT, lambda *_: held.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        signal.raise_signal(signal.SIGINT)  # once more, now for whoever handles it


def _nd(array):
    """The same as an `mx.nd` array: for an `mx.np` one, one that shares its memory."""
    if isinstance(array, mx.np.ndarray):
        return array.as_nd_ndarray()
    return array if isinstance(array, mx.nd.NDArray) else mx.nd.array(array, dtype=array.dtype)


def _check(call, net, devices):
    names = check_devices(call, devices)
    for name, parameter in net.collect_params().items():
        try:
            where = [str(d) for d in parameter.list_ctx()]
        except RuntimeError as error:
            raise ValueError(f"{call}(net): {name} is not initialised; "
                             "net.initialize(ctx=devices) does it") from error
        if set(where) != set(names):
            raise ValueError(f"{call}(devices={names}): but {name} is on {where}; pass just the "
                             "devices on which the network was initialised: one left out falls "
                             "behind")
