"""The training loop that the chapters from 06 on share.

It is chapter 06's own loop with what a long run needs besides: a progress bar, an end at the first
loss that is not a number, and an interrupt that leaves no step half done. It works on `mx.nd`
arrays and, after `npx.set_np()`, on `mx.np` ones.
"""

import json
import math
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

from helpers.parallel import assert_replicas_equal, split_and_load

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
    """What `fit` saw: a loss for each step, the mean over its batch; the others for each epoch.

    An accuracy is NaN where there is none: where outputs aren't `[n, classes]` with two classes or
    more, or labels aren't one class number an example.
    """

    losses: list = field(default_factory=list)
    train_accuracy: list = field(default_factory=list)  # while the weights were changing
    test_accuracy: list = field(default_factory=list)  # where `test` was given
    seconds: list = field(default_factory=list)  # training only
    rate: list = field(default_factory=list)  # images/s


@contextmanager
def _drained():
    """If what it is around raises, wait for all that is queued, and clear errors nobody has seen.

    MXNet keeps an operator's error until somebody waits: that would be the next run, a right one.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):  # one is raised already; waiting clears all others
            mx.nd.waitall()
        raise


@_drained()
def fit(net, trainer, batches, devices, epochs=1, test=None, loss=None, progress=True, title=""):
    """Train `net` on all `devices` at once; returns a `History`.

    net: initialised on just these devices; trainer: a `gluon.Trainer` of its parameters, made
    after that; batches: an iterable that gives an epoch of `(x, y)` each time, such as `Batches`
    or a `gluon.data.DataLoader`; test: one more, for the accuracy after each epoch; loss: gives a
    number for each example, `[n]` or `[n, 1]`, softmax cross-entropy by default. That number must
    not depend on the other examples of the shard, or several devices train otherwise than one, and
    nothing says so: with labels to ignore, give those a loss of 0, and divide by the whole batch's
    valid labels, not by the shard's.

    A trainer whose optimizer states were loaded goes on as it would have where they were saved,
    also on other devices. To clip gradients or do else something between the sum and the update,
    hand over a `gluon.Trainer(..., update_on_kvstore=False)` of a class of your own, whose
    `step(n)` calls `allreduce_grads()`, then your code, then `update(n)`.

    Each step uses the whole batch and divides by its own number of examples, on all devices
    together, `trainer.step(len(x))`, also a last one that is smaller or doesn't divide. (To leave
    that one out is the loader's part: `DataLoader(..., last_batch="discard")`.) A device for which
    nothing is left takes part with gradients of zero, or its old ones would count once more.
    Where devices wait for each other in the forward pass, as in `SyncBatchNorm`, all must come, and
    with equal shards: there a batch that doesn't divide is refused. (On CPU devices many such
    layers can also hang for want of scratch space: MXNET_CPU_TEMP_COPY, deeper: The law of the
    difference.)

    Raises ValueError where devices aren't those of net and trainer, MXNetError where something
    computed before has failed, both before anything is computed; TypeError or ValueError where a
    batch or a loss doesn't fit, before that step changes a weight.
    FloatingPointError with the step's number (from 0) at a loss that is not finite, or at an
    epoch's end at a weight that isn't; AssertionError where replicas are no longer equal then; what
    an operator raises, after which weights may hold anything: load or initialise them anew, with a
    new trainer. Nothing stays queued that the next call would raise again.

    An interrupt (Ctrl-C) takes effect when the step that Python is in has ended; then the replicas
    are equal, which is asserted, and training can go on from there.
    """
    _check_places("fit", net, devices)
    _check_trainer(trainer, net, devices)
    _carry_counts(trainer, devices)
    equal = _check_meetings(net, devices)
    _check_queue()
    loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
    history = History()
    try:
        for epoch in range(epochs):
            name = title if title and epochs == 1 else f"{title} epoch {epoch + 1}/{epochs}".strip()
            with _whole():  # the bar as well: it has locks, which nobody would open again
                bar = tqdm(batches, name, disable=not progress, file=sys.stdout, ncols=79,
                           leave=False)
            try:
                _epoch(net, trainer, loss, batches, devices, history, bar, equal)
            finally:
                with _whole():
                    bar.close()
            _assert_finite(net, epoch)
            assert_same_parameters(net)
            if test is not None:
                history.test_accuracy.append(accuracy(net, test, devices))
    except KeyboardInterrupt:
        mx.nd.waitall()
        with suppress(gluon.parameter.DeferredInitializationError):  # not one step yet
            assert_same_parameters(net)
        raise KeyboardInterrupt("training stopped between two steps: the replicas are equal, and "
                                "it can go on from here") from None  # where it was is no news
    return history


def _epoch(net, trainer, loss, batches, devices, history, bar, equal):
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

    for batch in batches:
        with _whole():
            x, y = _pair("fit", batch)
            if equal:
                _check_shards(x, devices)
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
        for value, (_, y) in zip(losses, shards):
            _check_loss(value, len(y))
        zeros = [(p.data(device) * 0).sum() for device in idle for p in _changing(trainer, net)]
    autograd.backward(losses + zeros)
    trainer.step(len(x))
    return losses, [(out, y) for out, (_, y) in zip(outputs, shards)]


def _read(step):
    """The mean loss and the number of right answers of a step; waits for them."""
    losses, answers = step
    losses = np.concatenate([a.asnumpy() for a in losses]).astype("float64")
    return losses.mean(), _hits(answers)


def _hits(answers):
    """How many answers are right; NaN where `History` says that there is no accuracy."""
    hits = 0
    for out, y in answers:
        classes = isinstance(out, mx.nd.NDArray) and out.ndim == 2 and out.shape[1] > 1
        if not classes or y.size != len(y):
            return math.nan
        # By NumPy: each operator on a device would cost Python more time than the counting takes.
        hits += int((out.asnumpy().argmax(axis=1) == y.asnumpy().ravel()).sum())
    return hits


@_drained()
def accuracy(net, batches, devices):
    """The share of right answers, 0 to 1; each device answers for its shard of each batch.

    Where layers keep statistics a device (BatchNorm), each shard is judged with its device's own.
    NaN where `History` says that there is no accuracy. Raises ValueError or TypeError where net,
    batches and devices don't fit, ValueError where `batches` gives nothing, and what an operator
    raises; nothing stays queued that the next call would raise again.
    """
    _check_places("accuracy", net, devices)
    pending, right, seen = [], 0, 0
    for batch in batches:
        with _whole():
            x, y = _pair("accuracy", batch)
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


def _parameters(trainer, net):
    """What the trainer knows, a loss's weights, say; of a stand-in for one, the network's."""
    if isinstance(trainer, gluon.Trainer):
        return trainer._params
    return list(net.collect_params().values())


def _changing(trainer, net):
    return [p for p in _parameters(trainer, net) if p.grad_req != "null"]


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


# ---------------------------------------------------------------------- what can't be trained


def _check_places(call, net, devices):
    for parameter in net.collect_params().values():
        _check_place(call, parameter.name, parameter.list_ctx(), devices)


def _check_place(call, name, where, devices):
    names, where = [str(d) for d in devices], [str(d) for d in where]
    if sorted(where) != sorted(names):
        raise ValueError(f"{call}(devices={names}): but {name} is on {where}; pass just the "
                         "devices on which the network was initialised, each once: one left out "
                         "falls behind")


def _check_trainer(trainer, net, devices):
    """It must change weights on these devices, by gradients that are of this step alone."""
    if isinstance(trainer, gluon.Trainer):
        _check_place("fit", "the trainer", trainer._contexts, devices)
    for parameter in _parameters(trainer, net):
        _check_place("fit", parameter.name, parameter.list_ctx(), devices)
        if parameter.grad_req == "add":
            raise ValueError(f"fit(trainer): {parameter.name} has grad_req='add', so each step "
                             "would use the gradients of all steps before once more; "
                             "parameter.grad_req = 'write' makes them anew")


def _carry_counts(trainer, devices):
    """Let each device go on at the latest step: MXNet counts them by device number.

    States that were saved on other devices have no count for these. A schedule of rates would stand
    still, and Adam's correction begin anew. 0 is the number under which a store counts.
    """
    if isinstance(trainer, gluon.Trainer):
        counts, latest = trainer._optimizer._all_index_update_counts, {}
        for made in counts.values():
            latest = {index: max(made.get(index, 0), latest.get(index, 0))
                      for index in made | latest}
        for number in {0, *(device.device_id for device in devices)}:
            counts[number] = dict(latest)


def _meetings(block):
    """The operators at which devices wait for each other: what each was told, as dicts.

    They are those that know how many devices come, `ndev`. A block that can tell its graph is
    asked for it, and otherwise its parts are. One called in a plain Block's own `forward` isn't
    found.
    """
    if isinstance(block, gluon.HybridBlock) and not mx.util.is_np_array():  # they know no mx.np
        with suppress(Exception):  # many arguments, or code that needs the numbers
            graph = json.loads(block.forward(mx.sym.var("x")).tojson())
            told = [node.get("attrs", {}) for node in graph["nodes"]]
            return [t for t in told if "ndev" in t and t.get("use_global_stats") != "True"]
    found = []
    for part in block._children.values():
        found += _meetings(part)
    return found


def _check_meetings(net, devices):
    """Where devices wait for each other they wait for all of these, once in each forward pass.

    Returns whether they do so anywhere.
    """
    met = set()
    for told in _meetings(net):
        name = told["key"]
        if int(told["ndev"]) != len(devices):
            raise ValueError(f"fit(net): {name} waits for num_devices={told['ndev']}, but there "
                             f"are {len(devices)}; needs num_devices={len(devices)}, or it hangs "
                             "or leaves devices out")
        if name in met:
            raise ValueError(f"fit(net): {name} is used twice in a forward pass, which MXNet can't "
                             "tell apart and may crash; use two layers")
        met.add(name)
    return bool(met)


def _check_queue():
    try:
        mx.nd.waitall()
    except Exception as error:
        raise mx.MXNetError("fit: something computed before it had failed, as is told above. The "
                            "error is cleared now, but arrays may hold old values: compute them "
                            "anew, then call fit again") from error


def _pair(call, batch):
    """A batch's `x` and `y`."""
    several = isinstance(batch, tuple | list)
    kinds = [type(a).__name__ for a in batch] if several else type(batch).__name__
    if not several or len(batch) != 2 or not all(isinstance(a, mx.nd.NDArray) for a in batch):
        raise TypeError(f"{call}(batches): gave {kinds}; needs (x, y), two NDArrays, as "
                        "Batches(images, labels, size) and a DataLoader of pairs give")
    x, y = batch
    if len(x) != len(y) or not len(x):
        raise ValueError(f"{call}(batches): gave x {x.shape} and y {y.shape}; needs at least one "
                         "example, and a label for each")
    return x, y


def _check_shards(x, devices):
    k = len(devices)
    if len(x) % k:
        raise ValueError(f"fit(batches): gave {len(x)} examples for {k} devices, which wait for "
                         "each other (SyncBatchNorm): one without any would not come, and means of "
                         "unequal shards count as if they were equal. Needs batches of a multiple "
                         f"of {k}; a DataLoader with last_batch='discard' leaves out the last one")


def _check_loss(value, n):
    """Its sum over all devices is differentiated, and the step divides that by the batch."""
    if value.size != n or value.shape[:1] != (n,):
        raise ValueError(f"fit(loss): gave shape {value.shape} for {n} examples; needs one number "
                         "for each, (n,), not their mean or sum: fit itself divides by the batch's "
                         "size")
