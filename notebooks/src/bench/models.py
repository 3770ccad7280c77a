"""What chapters teach and the bench measures, beyond what `helpers` has: networks and loops.

They are written here again; a chapter's own stand in the chapter.
"""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from helpers import split_and_load
from helpers.by_hand import lenet, train_batch


def lenet_of(first, second):
    """Chapter 06's LeNet with as many channels as asked for."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(first, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(second, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net


def lenet_tutorial():
    """The network of the MXNet tutorial on several GPUs."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(6, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(16, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(120, activation="relu"), nn.Dense(84, activation="relu"), nn.Dense(10))
    return net


class GroupNorm(nn.GroupNorm):
    """Gluon's, which takes `mx.nd` arrays only, for `mx.np` arrays."""

    def hybrid_forward(self, F, x, gamma, beta):
        old = [array.as_nd_ndarray() for array in (x, gamma, beta)]
        return super().hybrid_forward(F, *old).as_np_ndarray()


def warm_up(rate, steps):
    """A schedule that rises from 0 to `rate` in `steps` steps and stays there."""
    # `step` has to be given; with the default factor of 1 it changes nothing.
    return mx.lr_scheduler.FactorScheduler(step=10**9, base_lr=rate, warmup_steps=steps)


def share_statistics(net):
    """Set running means and variances of all devices to their average, in place."""
    for parameter in net.collect_params().values():
        if parameter.grad_req == "null":  # not trained: a running mean or variance
            copies = [array.as_in_ctx(mx.cpu(0)) for array in parameter.list_data()]
            average = sum(copies) / len(copies)
            for array in parameter.list_data():
                array[:] = average


def count_operations(net):
    """Multiplications and additions of a forward pass of one image `[1, 1, 28, 28]`.

    Of convolutions and dense layers, as others are little beside them: two for each weight and
    each place of the output.
    """
    counted = []

    def note(layer, inputs, output):
        counted.append(2 * output.size * int(np.prod(layer.weight.shape[1:])))

    layers = []
    net.apply(layers.append)
    hooks = [layer.register_forward_hook(note) for layer in layers
             if isinstance(layer, (nn.Conv2D, nn.Dense))]
    net(mx.np.zeros((1, 1, 28, 28)))
    for hook in hooks:
        hook.detach()
    return sum(counted)


# --- chapter 04, from scratch -----------------------------------------------------------------


def train(replicas, devices, batches, lr):
    """Train in place on `batches` of (x, y); returns each step's mean loss, a float.

    Raises FloatingPointError, two steps late at most, where a loss is not finite.
    """
    def finite(loss, step):
        value = loss.asscalar()  # waits until this loss is computed
        if not np.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {step}")
        return value

    losses = []
    for step, (x, y) in enumerate(batches):
        losses.append(train_batch(x, y, replicas, devices, lr))
        if step >= 2:
            finite(losses[step - 2], step - 2)
    return [finite(loss, step) for step, loss in enumerate(losses)]


def accuracy(replicas, devices, dataset):
    """The share of the images of `dataset`, (images, labels), that are classified right."""
    images, labels = dataset
    right = 0
    for begin in range(0, len(labels), 500):
        x_shards = split_and_load(images[begin : begin + 500], devices, even=False)
        y_shards = split_and_load(labels[begin : begin + 500], devices, even=False)
        counts = []
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            counts.append((lenet(x_shard, replica).argmax(axis=1) == y_shard).sum())
        right += sum(count.asscalar() for count in counts)
    return right / len(labels)
