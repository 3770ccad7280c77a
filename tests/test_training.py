"""The training loop against NumPy, plain Gluon and real interrupts; its batches and its checks."""

import contextlib
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from helpers import training  # first, so that MXNet finds its settings

# isort: split
import mxnet as mx
import numpy as np
import psutil
import pytest
from common import cpus, raises
from mxnet import autograd, gluon

from helpers.training import Batches, accuracy, assert_same_parameters, fit

HERE = Path(__file__).resolve().parent
# Whole batches and uneven ones; 2 and 1 leave devices idle, and something comes after each.
SIZES = [8, 7, 2, 8, 1, 6]
TRAINERS = {"default": {}, "update_on_kvstore=False": {"update_on_kvstore": False}}
RATE, MOMENTUM = 0.25, 0.875  # MXNet rounds them to float32: these it keeps
each_trainer = pytest.mark.parametrize("how", TRAINERS)
each_number_of_devices = pytest.mark.parametrize("k", [1, 2, 3, 4])


# ---------------------------------------------------------------------- NumPy's own training


def start():
    """Weights and biases of 4 -> 5 (tanh) -> 3."""
    rng = np.random.default_rng(7)
    return [rng.normal(size=shape) for shape in [(5, 4), (5,), (3, 5), (3,)]]


def examples(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 4)), rng.integers(0, 3, n).astype("int32")) for n in sizes]


def forward(weights, x):
    hidden = np.tanh(x @ weights[0].T + weights[1])
    return hidden, hidden @ weights[2].T + weights[3]


def numpy_step(weights, x, y):
    """The mean loss, the number of right answers, and the gradient of the loss's sum."""
    hidden, out = forward(weights, x)
    p = np.exp(out) / np.exp(out).sum(axis=1, keepdims=True)
    loss, right = -np.log(p[range(len(y)), y]).mean(), (out.argmax(axis=1) == y).sum()
    p[range(len(y)), y] -= 1
    back = p @ weights[2] * (1 - hidden**2)
    return loss, right, [back.T @ x, back.sum(axis=0), p.T @ hidden, p.sum(axis=0)]


class NumPy:
    """SGD with momentum, one epoch a call; what `History` holds."""

    def __init__(self, rate=RATE, frozen=()):
        self.weights, self.rate, self.frozen = start(), rate, frozen
        self.speed = [0 * w for w in self.weights]
        self.losses, self.train_accuracy, self.test_accuracy = [], [], []

    def epoch(self, batches, test=None):
        right = 0
        for x, y in batches:
            loss, hits, gradients = numpy_step(self.weights, x, y)
            scale = float(np.float32(1 / len(y)))  # which MXNet rounds too
            self.losses.append(loss)
            right += hits
            for i, g in enumerate(gradients):
                if i not in self.frozen:
                    self.speed[i] = MOMENTUM * self.speed[i] - self.rate * scale * g
                    self.weights[i] = self.weights[i] + self.speed[i]
        self.train_accuracy.append(right / sum(len(y) for _, y in batches))
        if test is not None:
            self.test_accuracy.append(self.accuracy(test))

    def accuracy(self, batches):
        hits = sum((forward(self.weights, x)[1].argmax(axis=1) == y).sum() for x, y in batches)
        return hits / sum(len(y) for _, y in batches)


# ---------------------------------------------------------------------- the same in Gluon


def array(values, dtype=None):
    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return make(values, dtype=dtype or values.dtype)


def arrays(batches):
    return [(array(x), array(y)) for x, y in batches]


def network(k, hybrid=False):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, activation="tanh", in_units=4), gluon.nn.Dense(3, in_units=5))
    net.cast("float64")
    net.initialize(mx.init.Zero(), ctx=cpus(k))  # in np mode the random ones know no float64
    for parameter, values in zip(net.collect_params().values(), start(), strict=True):
        parameter.set_data(array(values))
    if hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def sgd(net, rate=RATE, **how):
    settings = {"learning_rate": rate, "momentum": MOMENTUM}
    return gluon.Trainer(net.collect_params(), "sgd", settings, **how)


def train(net, trainer, batches, k, **more):
    return fit(net, trainer, batches, cpus(k), **{"progress": False} | more)


def replicas(net):
    """The weights of each device, as one list."""
    every = [[a.asnumpy() for a in p.list_data()] for p in net.collect_params().values()]
    return [list(weights) for weights in zip(*every, strict=True)]


def assert_close(ours, expected):
    """Equal but for rounding: to 1e-12 of the largest entry."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= 1e-12 * np.abs(expected).max()


def assert_weights(net, weights, k):
    assert len(replicas(net)) == k
    for replica in replicas(net):
        for ours, expected in zip(replica, weights, strict=True):
            assert_close(ours, expected)


def assert_history(history, expected, images):
    assert_close(history.losses, expected.losses)
    assert all(isinstance(loss, float) for loss in history.losses)
    assert_close(history.train_accuracy, expected.train_accuracy)
    assert history.test_accuracy == expected.test_accuracy
    assert len(history.seconds) == len(history.rate) == len(expected.train_accuracy)
    for seconds, rate in zip(history.seconds, history.rate, strict=True):
        assert seconds > 0
        assert math.isclose(seconds * rate, images)


@each_number_of_devices
@each_trainer
@pytest.mark.parametrize("hybrid", [False, True])
def test_all_is_as_in_numpy(k, how, hybrid):
    numpys, batches, test = NumPy(), examples(), examples([9, 4, 1], seed=1)
    for _ in range(3):
        numpys.epoch(batches, test)
    net = network(k, hybrid)
    trainer = sgd(net, **TRAINERS[how])
    history = train(net, trainer, arrays(batches), k, epochs=3, test=arrays(test))
    assert_weights(net, numpys.weights, k)
    assert_history(history, numpys, sum(SIZES))


@each_trainer
@pytest.mark.parametrize("sizes", [[1, 9, 9], [2, 9], [9, 1, 1, 9]])
def test_idle_devices_from_the_first_step_or_twice(how, sizes):
    numpys, batches = NumPy(), examples(sizes)
    numpys.epoch(batches)
    net = network(4)
    train(net, sgd(net, **TRAINERS[how]), arrays(batches), 4)
    assert_weights(net, numpys.weights, 4)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("frozen", [[0], [1, 2], [2, 3]])
def test_frozen_parameters_stay(k, frozen):
    numpys = NumPy(frozen=frozen)
    numpys.epoch(examples())
    net = network(k)
    for i in frozen:
        list(net.collect_params().values())[i].grad_req = "null"
    history = train(net, sgd(net), arrays(examples()), k)
    assert_weights(net, numpys.weights, k)
    assert_close(history.losses, numpys.losses)


def test_another_loss():
    numpys = NumPy(rate=2 * RATE)
    numpys.epoch(examples())
    net, entropy = network(2), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = sgd(net)
    history = train(net, trainer, arrays(examples()), 2, loss=lambda out, y: 2 * entropy(out, y))
    assert_weights(net, numpys.weights, 2)
    assert_close(history.losses, 2 * np.array(numpys.losses))


@pytest.mark.parametrize("k", [1, 3])
def test_a_dataloader(k):
    x, y = (np.concatenate(part) for part in zip(*examples(), strict=True))
    numpys, parts = NumPy(), [(x[i : i + 5], y[i : i + 5]) for i in range(0, len(y), 5)]
    assert len(parts[-1][0]) == 2
    for _ in range(2):
        numpys.epoch(parts)
    net = network(k)
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), batch_size=5)
    assert_history(train(net, sgd(net), loader, k, epochs=2), numpys, len(y))
    assert_weights(net, numpys.weights, k)


def lenet(k):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(20, 3, activation="relu", in_channels=1), gluon.nn.AvgPool2D(),
            gluon.nn.Conv2D(50, 5, activation="relu", in_channels=20), gluon.nn.AvgPool2D(),
            gluon.nn.Dense(128, activation="relu", in_units=800),
            gluon.nn.Dense(10, in_units=128))
    net.initialize(mx.init.Xavier(), ctx=cpus(k))
    return net


def plain_step(net, trainer, x, y, k):
    """A step as MXNet's own documents write it."""
    shards = [gluon.utils.split_and_load(a, cpus(k)) for a in (x, y)]
    with autograd.record():
        losses = [gluon.loss.SoftmaxCrossEntropyLoss()(net(a), b) for a, b in zip(*shards)]
    autograd.backward(losses)
    trainer.step(len(x))


def test_a_convolutional_network_hybridised_or_not_is_as_in_plain_gluon():
    rng, nets = np.random.default_rng(0), [lenet(1), lenet(3), lenet(3)]
    x, y = rng.normal(size=(3, 6, 1, 28, 28)), rng.integers(0, 10, (3, 6)).astype("int32")
    batches = [(array(a), array(b)) for a, b in zip(x, y)]
    for net in nets:
        net.cast("float64")
        for mine, first in zip(net.collect_params().values(), nets[0].collect_params().values()):
            mine.set_data(first.data(mx.cpu(0)))
    nets[2].hybridize(static_alloc=True, static_shape=True)
    trainer = sgd(nets[0], 0.05)
    for a, b in batches:
        plain_step(nets[0], trainer, a, b, 1)
    first, second = (train(net, sgd(net, 0.05), batches, 3) for net in nets[1:])
    for net in nets[1:]:
        assert_weights(net, replicas(nets[0])[0], 3)
    assert_close(first.losses, second.losses)


def test_a_network_that_learns_its_shapes_from_a_batch_too_small_for_all():
    net, numpys = gluon.nn.Sequential(), NumPy()
    net.add(gluon.nn.Dense(5, activation="tanh"), gluon.nn.Dense(3))
    net.cast("float64")
    net.initialize(mx.init.Constant(0.1), ctx=cpus(3))
    numpys.weights = [np.full(w.shape, 0.1 if w.ndim == 2 else 0.0) for w in numpys.weights]
    numpys.epoch(examples([1, 8]))
    train(net, sgd(net), arrays(examples([1, 8])), 3)
    assert_weights(net, numpys.weights, 3)


def test_seconds_are_those_of_training_only():
    def slow():
        time.sleep(0.4)
        yield from arrays(examples([4]))

    net, before = network(2), time.perf_counter()
    history = train(net, sgd(net), arrays(examples()), 2, test=slow())
    assert history.seconds[0] <= time.perf_counter() - before - 0.4


def test_no_epoch():
    net = network(2)
    assert train(net, sgd(net), arrays(examples()), 2, epochs=0) == training.History()
    assert_weights(net, start(), 2)


def test_the_bar_tells_epoch_and_loss_on_stdout_and_only_if_asked(capfd):
    net = network(2)
    more = {"epochs": 2, "test": arrays(examples([3]))}
    train(net, sgd(net), arrays(examples()), 2, **more)
    assert capfd.readouterr() == ("", "")
    train(net, sgd(net), arrays(examples()), 2, progress=True, title="two devices", **more)
    out, err = capfd.readouterr()
    assert "two devices epoch 1/2:" in out and "two devices epoch 2/2:" in out
    assert not out.rsplit("\r", 1)[-1].strip()  # the last bar is wiped away
    assert err == ""


def child(call, group=False):
    """A new Python that has imported this file and runs `call`."""
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    return subprocess.Popen(
        [sys.executable, "-c", f"import test_training as t; t.{call}"], text=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=group)


def train_in_np_mode():
    mx.npx.set_np()
    for k, hybrid, how in [(1, False, "default"), (3, False, "default"), (3, True, "default"),
                           (4, False, "update_on_kvstore=False")]:
        net, seen = network(k, hybrid), []
        for x, y in Batches(*examples([17])[0], 8):
            assert type(x) is type(y) is mx.np.ndarray
            seen += y.asnumpy().tolist()
        trainer = sgd(net, **TRAINERS[how])
        history = train(net, trainer, arrays(examples()), k, test=arrays(examples([9, 1])))
        print(json.dumps({"k": k, "weights": [[w.tolist() for w in r] for r in replicas(net)],
                          "history": vars(history), "labels": seen}))


def test_np_mode_is_as_numpy_too():
    numpys = NumPy()
    numpys.epoch(examples(), examples([9, 1]))
    process = child("train_in_np_mode()")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == "", err
    runs = [json.loads(line) for line in out.splitlines()]
    assert [run["k"] for run in runs] == [1, 3, 3, 4]
    for run in runs:
        assert len(run["weights"]) == run["k"]
        for replica in run["weights"]:
            for ours, expected in zip(replica, numpys.weights, strict=True):
                assert_close(ours, expected)
        assert_history(training.History(**run["history"]), numpys, sum(SIZES))
        assert sorted(run["labels"]) == sorted(examples([17])[0][1].tolist())


# ---------------------------------------------------------------------- accuracy


@each_number_of_devices
@pytest.mark.parametrize("sizes", [[12], SIZES, [1], [8] * 5, [5, 5, 5, 2]])
def test_accuracy_is_numpys(k, sizes):
    batches, net = examples(sizes, seed=3), network(k)
    share = accuracy(net, arrays(batches), cpus(k))
    assert share == NumPy().accuracy(batches)
    assert share not in (0, 1) or sizes == [1]
    assert accuracy(net, iter(arrays(batches)), cpus(k)) == share


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "float32", "int64"])
def test_right_answers_are_counted_in_numbers_large_enough(dtype):
    """256 in uint8 are 0, and float16 knows no 2049."""
    x = examples([4099])[0][0]
    y = forward(start(), x)[1].argmax(axis=1)
    y[-1] = (y[-1] + 1) % 3
    batch, net = [(array(x), array(y, dtype))], network(2)
    assert accuracy(net, batch, cpus(2)) == 4098 / 4099
    assert train(net, sgd(net, 0), batch, 2).train_accuracy == [4098 / 4099]


def test_accuracy_of_a_network_that_learns_its_shapes_then():
    net = gluon.nn.Dense(3)
    net.initialize(mx.init.Zero(), ctx=cpus(3))
    x, y = examples([20])[0]
    share = accuracy(net, [(array(x, "float32"), array(y))], cpus(3))
    assert share == (y == 0).mean()  # the first of equal outputs wins
    assert 0 < share < 1
    assert_same_parameters(net)


def test_accuracy_uses_every_device():
    """On each, another class always wins."""
    net = network(3)
    for r, bias in enumerate(net[1].bias.list_data()):
        bias[:] = array(1e3 * np.eye(3)[r])
    batch = array(np.zeros((7, 4))), array(np.array([0, 0, 0, 1, 1, 2, 2], dtype="int32"))
    assert accuracy(net, [batch], cpus(3)) == 1
    batch = array(np.zeros((2, 4))), array(np.array([0, 1], dtype="int32"))
    assert accuracy(net, [batch], cpus(3)) == 1


# ---------------------------------------------------------------------- the batches


def pictures(n, dtype="float32"):
    """No two alike, and each knows its label."""
    values = np.arange(n)[:, None, None] + np.array([[0.25, 0.5]])
    return values.astype(dtype), (np.arange(n) * 3).astype("int32")


def content(batches):
    pairs = [(x.asnumpy(), y.asnumpy()) for x, y in batches]
    return [np.concatenate(part) for part in zip(*pairs, strict=True)]


@pytest.mark.parametrize("n, size, lengths", [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 5, [3]),
                                              (4, 1, [1] * 4), (1, 1, [1])])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_example_once_with_its_label(n, size, lengths, shuffle):
    images, labels = pictures(n)
    batches = Batches(images, labels, size, shuffle)
    assert len(batches) == len(lengths)
    for _ in range(3):
        assert [(len(x), len(y)) for x, y in batches] == [(s, s) for s in lengths]
        x, y = content(batches)
        assert x.shape == images.shape
        np.testing.assert_array_equal(np.sort(y), labels)
        np.testing.assert_array_equal(x, images[y // 3])


def orders(epochs=4, **settings):
    batches = Batches(*pictures(50), 8, **settings)
    return [content(batches)[1].tolist() for _ in range(epochs)]


def test_another_order_each_epoch_and_the_same_ones_with_the_same_seed():
    first = orders(seed=3)
    assert orders(seed=3) == first
    every = [*first, *orders(seed=4), *orders(), sorted(first[0])]
    assert len({tuple(order) for order in every}) == len(every)
    assert orders(seed=0) == orders()


def test_the_order_depends_on_no_other_random_numbers():
    np.random.seed(1)
    first = orders()
    np.random.seed(2)
    assert orders() == first


def test_without_shuffling_the_order_is_kept():
    assert orders(shuffle=False) == [pictures(50)[1].tolist()] * 4


@pytest.mark.parametrize("as_array", [np.array, mx.nd.array, mx.np.array])
@pytest.mark.parametrize("image_type", ["float32", "float64", "uint8"])
@pytest.mark.parametrize("label_type", ["float32", "int32", "uint8", "int64"])
def test_numbers_keep_their_types(as_array, image_type, label_type):
    images, labels = pictures(5, image_type)[0], pictures(5)[1].astype(label_type)
    given = [as_array(a, dtype=a.dtype) for a in (images, labels)]
    for x, y in Batches(*given, 2):
        assert [np.dtype(a.dtype) for a in (x, y)] == [image_type, label_type]
        assert type(x) is type(y) is mx.nd.NDArray
        np.testing.assert_array_equal(x.asnumpy(), images[y.asnumpy().astype(int) // 3])


@pytest.mark.parametrize("as_array", [np.array, mx.nd.array, mx.np.array])
def test_in_np_mode_batches_are_mx_np_arrays(as_array):
    images, labels = pictures(5)
    with mx.util.np_shape(True), mx.util.np_array(True):
        batches = list(Batches(as_array(images), as_array(labels, dtype="int32"), 2))
        assert all(type(a) is mx.np.ndarray for batch in batches for a in batch)
        assert [x.shape for x, _ in batches] == [(2, 1, 2), (2, 1, 2), (1, 1, 2)]
        x, y = content(batches)
        np.testing.assert_array_equal(x, images[y // 3])


def test_batches_are_on_the_first_cpu_wherever_the_data_was():
    for home in (0, 1):
        data = [mx.nd.array(a, ctx=mx.cpu(home)) for a in pictures(5)]
        with mx.Context("cpu", 2):
            for batch in (*Batches(*data, 2), *Batches(*pictures(5), 2)):
                assert [a.context for a in batch] == [mx.cpu(0)] * 2


def test_batches_are_copies():
    images, labels = mx.nd.array([[1.0], [2.0]]), mx.nd.array([1, 2])
    for x, y in Batches(images, labels, 2, shuffle=False):
        x[:] = y[:] = 9
    assert images.asnumpy().tolist() == [[1], [2]] and labels.asnumpy().tolist() == [1, 2]


def test_batches_that_cannot_be():
    with raises(ValueError, "images, labels", "5 images but 4 labels", "each image needs one"):
        Batches(pictures(5)[0], pictures(4)[1], 2)
    for size in (0, -1):
        with raises(ValueError, f"size={size}", "5 images", "at least one a batch"):
            Batches(*pictures(5), size)
    with raises(ValueError, "size=2", "0 images", "at least one image"):
        Batches(*pictures(0), 2)


# ---------------------------------------------------------------------- what goes wrong


@each_number_of_devices
@pytest.mark.parametrize("at", range(len(SIZES)))
def test_a_loss_that_is_nan_names_its_step(k, at, capfd):
    batches, net = examples(), network(k)
    batches[at][0][-1, 0] = math.nan  # one number, on the last device in use
    with raises(FloatingPointError, f"the loss is nan at step {at}:", "data", "learning rate"):
        train(net, sgd(net), arrays(batches), k, progress=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_loss_is_no_number_either(bad):
    batches, net = [(x, 0.0 * y) for x, y in examples()], network(2)
    batches[3][1][0] = bad
    with raises(FloatingPointError, f"the loss is {bad} at step 3:"):
        train(net, sgd(net), arrays(batches), 2, loss=lambda out, y: out.sum(axis=1) * 0 + y)


def test_steps_are_counted_through_all_epochs():
    class Epochs:
        def __init__(self):
            self.left = [examples(), examples()]
            self.left[1][1][0][:] = math.nan

        def __iter__(self):
            return iter(arrays(self.left.pop(0)))

    net = network(2)
    with raises(FloatingPointError, f"at step {len(SIZES) + 1}:"):
        train(net, sgd(net), Epochs(), 2, epochs=2)


def test_a_learning_rate_too_high_ends_in_an_error():
    net = network(2)
    with raises(FloatingPointError, "at step \\d+:", "too high a learning rate"):
        train(net, sgd(net, 1e9), arrays(examples()), 2, epochs=9,
              loss=lambda out, y: (out * out).sum(axis=1))


@pytest.mark.parametrize("k", [1, 2])
def test_a_nan_that_the_loss_does_not_show_is_found_in_the_weights(k):
    """MXNet's relu makes 0 of NaN; the gradient of the weight before it is NaN all the same."""
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(5, activation="relu", in_units=4), gluon.nn.Dense(3, in_units=5))
    net.initialize(ctx=cpus(k))
    batches = [(array(x, "float32"), array(y)) for x, y in examples()]
    trainer = sgd(net)
    history = train(net, trainer, batches, k)
    assert np.isfinite(history.losses).all()
    assert all(isinstance(loss, float) for loss in history.losses)  # no float32
    batches[2][0][-1, 0] = math.nan
    with raises(FloatingPointError, f"{net[0].weight.name} has entries that are not finite",
                "end of epoch 1"):
        train(net, trainer, batches, k, epochs=2)


def test_replicas_that_part_are_noticed_and_named():
    net = network(2)
    trainer = sgd(net, kvstore=None)
    name = next(iter(net.collect_params()))
    with raises(AssertionError, f"{name}: ", "cpu\\(0\\) and cpu\\(1\\) differ"):
        train(net, trainer, arrays(examples()), 2)
    with pytest.raises(AssertionError):
        assert_same_parameters(net)


@pytest.mark.parametrize("which", range(4))
def test_a_single_changed_number_is_found(which):
    net = network(3)
    assert_same_parameters(net)
    name, parameter = list(net.collect_params().items())[which]
    array = parameter.data(mx.cpu(2))
    array.reshape(-1)[-1] += 1e-3
    with raises(AssertionError, f"{name}: ", "cpu\\(2\\) differ by up to 0.001 "):
        assert_same_parameters(net)
    share = 1e-3 / np.abs(start()[which]).max()
    with pytest.raises(AssertionError, match=name):
        assert_same_parameters(net, tolerance=0.99 * share)
    assert_same_parameters(net, tolerance=1.01 * share)
    parameter.grad_req = "null"
    assert_same_parameters(net)


def test_running_statistics_are_each_devices_own():
    net = gluon.nn.Sequential()
    net.add(gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(3, in_units=4))
    net.initialize(ctx=cpus(2))
    batches = [(array(x, "float32"), array(y)) for x, y in examples()]
    train(net, sgd(net, 0.01), batches, 2)
    means = [a.asnumpy() for a in net[0].running_mean.list_data()]
    assert np.abs(means[0] - means[1]).max() > 1e-3
    assert_same_parameters(net)
    net[0].gamma.data(mx.cpu(1))[:] += 1
    with pytest.raises(AssertionError, match=net[0].gamma.name):
        assert_same_parameters(net)


REFUSED = {
    "too few": ([0], ["devices=\\['cpu\\(0\\)'\\]", "on \\['cpu\\(0\\)', 'cpu\\(1\\)'\\]",
                      "initialised"]),
    "too many": ([0, 1, 2], ["devices=.*'cpu\\(2\\)'", "on \\['cpu\\(0\\)', 'cpu\\(1\\)'\\]"]),
    "others": ([2, 3], ["devices=\\['cpu\\(2\\)', 'cpu\\(3\\)'\\]", "_weight"]),
    "twice": ([0, 1, 1], ["devices=\\['cpu\\(0\\)', 'cpu\\(1\\)', 'cpu\\(1\\)'\\]", "twice"]),
    "none": ([], ["devices=\\[\\]", "at least one device"]),
}


@pytest.mark.parametrize("devices, parts", REFUSED.values(), ids=REFUSED)
def test_devices_that_do_not_fit_are_refused(devices, parts):
    net, chosen, used = network(2), [mx.cpu(i) for i in devices], []

    def batches():
        used.append(True)
        yield from arrays(examples())

    with raises(ValueError, *parts):
        fit(net, sgd(net), batches(), chosen, progress=False)
    with raises(ValueError, *parts):
        accuracy(net, batches(), chosen)
    assert not used
    assert_weights(net, start(), 2)


def test_a_network_without_weights_is_refused():
    net = gluon.nn.Dense(3, in_units=4)
    parts = f"{net.weight.name} is not initialised", "net.initialize\\(ctx=devices\\)"
    with raises(ValueError, *parts):
        fit(net, None, arrays(examples()), cpus(2), progress=False)
    with raises(ValueError, *parts):
        accuracy(net, arrays(examples()), cpus(2))


def test_devices_in_another_order_and_as_a_tuple():
    numpys = NumPy()
    numpys.epoch(examples())
    net = network(3)
    history = fit(net, sgd(net), arrays(examples()), tuple(cpus(3)[::-1]), progress=False)
    assert_weights(net, numpys.weights, 3)
    assert_close(history.losses, numpys.losses)


def test_an_iterator_that_is_used_up():
    net = network(2)
    trainer, once = sgd(net), iter(arrays(examples()))
    train(net, trainer, once, 2)
    before = replicas(net)[0]
    for call in (lambda: train(net, trainer, once, 2), lambda: accuracy(net, once, cpus(2)),
                 lambda: train(net, trainer, [], 2), lambda: accuracy(net, [], cpus(2))):
        with raises(ValueError, "batches", "no batch", "used up", "reset"):
            call()
    assert_weights(net, before, 2)


@pytest.mark.parametrize("once", [iter, zip, reversed, lambda a: (b for b in a), itertools.chain])
@pytest.mark.parametrize("name", ["batches", "test"])
def test_what_gives_one_pass_is_refused_for_two_epochs_before_the_first(once, name):
    net, used, batches = network(2), [], arrays(examples())

    class Watched(list):
        def __iter__(self):
            used.append(True)
            return super().__iter__()

    given = {"batches": Watched(batches), "test": batches} | {name: once(batches)}
    with raises(ValueError, f"fit\\({name}\\)", "one pass", "epochs=2", "DataLoader"):
        train(net, sgd(net), given["batches"], 2, epochs=2, test=given["test"])
    assert not used
    assert_weights(net, start(), 2)


def test_what_begins_anew_by_itself_gives_as_many_epochs_as_are_asked():
    class Anew:
        def __iter__(self):
            self.left = arrays(examples())
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    class ByNumber:  # no __iter__
        def __getitem__(self, i):
            return arrays(examples())[i]

    numpys = NumPy()
    numpys.epoch(examples())
    numpys.epoch(examples())
    for batches in (Anew(), ByNumber()):
        net = network(2)
        train(net, sgd(net), batches, 2, epochs=2)
        assert_weights(net, numpys.weights, 2)


X, Y = examples([8])[0]
NOT_BATCHES = {
    "DataBatch": (lambda: mx.io.NDArrayIter(X, Y, 4), TypeError, "gave DataBatch"),
    "dict": (lambda: [{"x": array(X), "y": array(Y)}], TypeError, "gave dict"),
    "no labels": (lambda: [array(X)], TypeError, "gave NDArray"),
    "two examples, no labels": (lambda: [array(X[:2])], TypeError, "gave NDArray"),
    "weights": (lambda: [(array(X), array(Y), array(Y))], TypeError, "NDArray.*NDArray.*NDArray"),
    "one batch": (lambda: (array(X), array(Y)), TypeError, "gave NDArray"),
    "NumPy": (lambda: [(X, Y)], TypeError, "\\['ndarray', 'ndarray'\\]"),
    "NumPy labels": (lambda: [(array(X), Y)], TypeError, "\\['NDArray', 'ndarray'\\]"),
    "two inputs": (lambda: [([array(X), array(X)], array(Y))], TypeError, "\\['list', 'NDArray'"),
    "text": (lambda: ["ab"], TypeError, "gave str"),
    "lengths": (lambda: [(array(X), array(Y[:7]))], ValueError, "x \\(8, 4\\) and y \\(7,\\)"),
    "one label": (lambda: [(array(X), array(Y[:1]))], ValueError, "y \\(1,\\)"),
    "no iterable": (lambda: 3, TypeError, "not int"),
    "nothing": (lambda: None, TypeError, "not NoneType"),
}


@pytest.mark.parametrize("make, error, what", NOT_BATCHES.values(), ids=NOT_BATCHES)
def test_batches_are_pairs_of_arrays_and_what_else_came_is_named(make, error, what):
    net = network(2)
    with raises(error, "fit\\(batches\\): ", what, "needs"):
        train(net, sgd(net), make(), 2)
    with raises(error, "accuracy\\(batches\\): ", what, "needs"):
        accuracy(net, make(), cpus(2))
    assert_weights(net, start(), 2)


def test_a_batch_of_another_kind_stops_before_its_step():
    numpys, net = NumPy(), network(2)
    numpys.epoch(examples()[:2])
    with raises(TypeError, "fit\\(batches\\): gave dict"):
        train(net, sgd(net), [*arrays(examples()[:2]), {}], 2)
    assert_weights(net, numpys.weights, 2)


ENTROPY = gluon.loss.SoftmaxCrossEntropyLoss()
NOT_LOSSES = {
    "mean": (lambda out, y: ENTROPY(out, y).mean(), ValueError, "\\(1,\\) for 4 examples"),
    "sum": (lambda out, y: ENTROPY(out, y).sum(), ValueError, "\\(1,\\) for 4 examples"),
    "each number": (lambda out, y: out * out, ValueError, "\\(4, 3\\) for 4 examples"),
    "a row": (lambda out, y: ENTROPY(out, y).expand_dims(0), ValueError, "\\(1, 4\\) for 4"),
    "batch axis 1": (gluon.loss.SoftmaxCELoss(batch_axis=1), ValueError, "\\(1,\\) for 4"),
    "None": (lambda out, y: None, TypeError, "NoneType"),
    "number": (lambda out, y: 0.5, TypeError, "float"),
    "NumPy": (lambda out, y: ENTROPY(out, y).asnumpy(), TypeError, "gave ndarray"),
    "tuple": (lambda out, y: (ENTROPY(out, y), out), TypeError, "tuple"),
    "class": (gluon.loss.SoftmaxCrossEntropyLoss, TypeError, "SoftmaxCrossEntropyLoss"),
}


@pytest.mark.parametrize("loss, error, what", NOT_LOSSES.values(), ids=NOT_LOSSES)
def test_a_loss_has_one_number_for_each_example(loss, error, what):
    net = network(2)
    with raises(error, "fit\\(loss\\): ", what, "needs", "each"):
        train(net, sgd(net), arrays([(X, Y)]), 2, loss=loss)
    assert_weights(net, start(), 2)


LOSSES = {
    "a column": (1, lambda out, y: ENTROPY(out, y).expand_dims(1)),
    "weight": (0.5, gluon.loss.SoftmaxCrossEntropyLoss(weight=0.5)),
    "weights by class": (1, lambda out, y: ENTROPY(out, y, mx.nd.ones_like(out[:, :1])[:, 0])),
}


@pytest.mark.parametrize("factor, loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_other_forms_that_have_a_number_for_each_example(factor, loss):
    numpys, net = NumPy(rate=factor * RATE), network(3)
    numpys.epoch(examples())
    history = train(net, sgd(net), arrays(examples()), 3, loss=loss)
    assert_weights(net, numpys.weights, 3)
    assert_close(history.losses, factor * np.array(numpys.losses))


def plain_epoch(net, trainer, loss, batches):
    """One device, as in MXNet's own documents."""
    for x, y in batches:
        with autograd.record():
            value = loss(net(x), y)
        value.backward()
        trainer.step(len(x))


class WithWeights(gluon.loss.Loss):
    """Whose weights the trainer changes too; they aren't the network's."""

    def __init__(self, k):
        super().__init__(None, 0)
        with self.name_scope():
            self.last = gluon.nn.Dense(3, in_units=3)
        self.cast("float64")
        self.initialize(mx.init.One(), ctx=cpus(k))
        self.last.weight.set_data(array(np.eye(3) + 0.5))

    def hybrid_forward(self, F, out, y):
        return F.pick(-F.log_softmax(self.last(out)), y)


@each_trainer
def test_idle_devices_count_nothing_twice_in_a_loss_with_weights_either(how):
    every = []
    for k in (1, 4):
        net, loss = network(k), WithWeights(k)
        both = {**net.collect_params(), **loss.collect_params()}
        trainer = gluon.Trainer(both, "sgd", {"learning_rate": RATE, "momentum": MOMENTUM},
                                **TRAINERS[how])
        if k == 1:
            plain_epoch(net, trainer, loss, arrays(examples()))
        else:
            train(net, trainer, arrays(examples()), k, loss=loss)
        every.append([replicas(net), replicas(loss)])
    (plain, plain_loss), (ours, ours_loss) = every
    for replica in ours:
        for a, b in zip(replica, plain[0], strict=True):
            assert_close(a, b)
    for replica in ours_loss:
        for a, b in zip(replica, plain_loss[0], strict=True):
            assert_close(a, b)


def test_layers_that_share_their_weights_and_an_embedding_of_sparse_gradients():
    def words(k):
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Embedding(6, 4, sparse_grad=True), gluon.nn.Flatten(),
                gluon.nn.Dense(8, in_units=8))
        net.add(gluon.nn.Dense(8, in_units=8, params=net[2].params), gluon.nn.Dense(3, in_units=8))
        net.cast("float64")
        net.initialize(mx.init.Zero(), ctx=cpus(k))
        rng = np.random.default_rng(0)
        for parameter in net.collect_params().values():
            parameter.set_data(array(rng.normal(size=parameter.shape) / 3))
        return net

    rng, one, four = np.random.default_rng(1), words(1), words(4)
    batches = arrays([(rng.integers(0, 6, (n, 2)).astype("float64"), rng.integers(0, 3, n))
                      for n in SIZES])
    plain_epoch(one, sgd(one, 0.05), ENTROPY, batches)
    train(four, sgd(four, 0.05), batches, 4)
    assert len(one.collect_params().keys()) == 5
    assert_weights(four, replicas(one)[0], 4)


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
@each_number_of_devices
def test_a_column_of_labels_is_as_good_as_a_row(k, dtype):
    numpys, net = NumPy(), network(k)
    numpys.epoch(examples(), examples())
    columns = [(array(x), array(y[:, None], dtype)) for x, y in examples()]
    history = train(net, sgd(net), columns, k, test=columns)
    assert_weights(net, numpys.weights, k)
    assert_history(history, numpys, sum(SIZES))


@pytest.mark.parametrize("n", [3, 8])
def test_one_hot_labels_train_and_have_no_accuracy(n):
    """Of three rows and three classes, each answer would be compared with each label's digits."""
    numpys, net, (x, y) = NumPy(), network(2), examples([n])[0]
    numpys.epoch([(x, y)])
    batch = [(array(x), array(np.eye(3)[y]))]
    history = train(net, sgd(net), batch, 2, test=batch,
                    loss=gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False))
    assert_weights(net, numpys.weights, 2)
    assert_close(history.losses, numpys.losses)
    assert np.isnan(history.train_accuracy).all() and np.isnan(history.test_accuracy).all()
    assert math.isnan(accuracy(net, batch, cpus(2)))


@pytest.mark.parametrize("targets", [1, 2])
def test_regression_is_as_in_closed_form_and_has_no_accuracy(targets):
    net, rng = gluon.nn.Dense(targets, in_units=4), np.random.default_rng(0)
    weights, bias = rng.normal(size=(targets, 4)), np.zeros(targets)
    net.cast("float64")
    net.initialize(mx.init.Zero(), ctx=cpus(3))
    net.weight.set_data(array(weights))
    batches = [(rng.normal(size=(n, 4)), rng.normal(size=(n, targets))) for n in (6, 2)]
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    history = train(net, trainer, arrays(batches), 3, loss=gluon.loss.L2Loss())
    losses = []
    for x, y in batches:
        error = x @ weights.T + bias - y
        losses.append((error**2).mean() / 2)
        scale = float(np.float32(1 / len(x))) / targets
        weights = weights - RATE * scale * error.T @ x
        bias = bias - RATE * scale * error.sum(axis=0)
    assert_weights(net, [weights, bias], 3)
    assert_close(history.losses, losses)
    assert np.isnan(history.train_accuracy).all()


@pytest.mark.parametrize("after", [lambda F, x: x.reshape((-1,)), lambda F, x: (x, x),
                                   lambda F, x: x.reshape((0, 0, 1, 1))])
def test_outputs_that_are_no_scores_of_classes_have_no_accuracy(after):
    net = gluon.nn.HybridSequential()
    net.add(network(2), gluon.nn.HybridLambda(after))

    def loss(out, y):
        return mx.nd.square(out[0] if isinstance(out, tuple) else out).reshape((len(y), -1)).sum(1)

    batch = arrays(examples([6]))
    assert np.isnan(train(net, sgd(net, 0), batch, 2, loss=loss).train_accuracy).all()
    assert math.isnan(accuracy(net, batch, cpus(2)))


# ---------------------------------------------------------------------- trainers


@pytest.mark.parametrize("which", [[0], [3], [1, 2]])
@each_trainer
def test_gradients_that_are_added_up_are_refused(which, how):
    net = network(2)
    parameters = list(net.collect_params().values())
    for i in which:
        parameters[i].grad_req = "add"
    with raises(ValueError, "fit\\(trainer\\)", parameters[which[0]].name, "'add'", "'write'"):
        train(net, sgd(net, **TRAINERS[how]), arrays(examples()), 2)
    assert_weights(net, start(), 2)


def test_trainers_that_cannot_train_this():
    net = network(2)
    for trainer in ("sgd", None, mx.optimizer.SGD()):
        with raises(TypeError, "fit\\(trainer\\)", type(trainer).__name__, "gluon.Trainer\\("):
            train(net, trainer, arrays(examples()), 2)
    with raises(ValueError, "devices=", "trainer is on .*cpu\\(2\\)"):
        train(net, sgd(network(3)), arrays(examples()), 2)
    with raises(TypeError, "fit\\(net\\)", "Block", "function"):
        train(lambda x: x, sgd(net), arrays(examples()), 2)
    trainer = sgd(net)
    train(net, trainer, arrays(examples()), 2)
    net.initialize(mx.init.Zero(), ctx=cpus(3), force_reinit=True)  # a step would crash
    with raises(ValueError, "devices=", "trainer is on \\['cpu\\(0\\)', 'cpu\\(1\\)'\\]"):
        train(net, trainer, arrays(examples()), 3)
    net.collect_params().setattr("grad_req", "null")
    with raises(ValueError, "fit\\(trainer\\)", "no parameter to change", "'null'", "'write'"):
        train(net, sgd(net), arrays(examples()), 3)
    rows = gluon.nn.Sequential()
    rows.add(gluon.contrib.nn.SparseEmbedding(6, 4))
    rows.initialize(ctx=cpus(2))
    with raises(ValueError, "fit\\(trainer\\)", "stype='row_sparse'", "stype='default'"):
        train(rows, sgd(rows), arrays(examples()), 2)


def test_a_stand_in_for_a_trainer_needs_only_its_step():
    class Twice:
        def __init__(self, trainer):
            self.trainer = trainer

        def step(self, size):
            self.trainer.step(size / 2)

    numpys, net = NumPy(rate=2 * RATE), network(4)
    numpys.epoch(examples())
    train(net, Twice(sgd(net)), arrays(examples()), 4)
    assert_weights(net, numpys.weights, 4)


# ---------------------------------------------------------------------- errors in operators


def fails():
    """An operator that fails when a device comes to it: no matrix like that has a root."""
    return mx.nd.linalg.potrf(-mx.nd.ones((1, 1), dtype="float64")).sum()


def failing(at, ranks):
    """A loss of which step `at` fails on these devices of two, when the device comes to it."""
    calls = itertools.count()

    def loss(out, y):
        value = ENTROPY(out, y)
        step, rank = divmod(next(calls), 2)
        if step == at and rank in ranks:
            value = value * fails().as_in_context(out.context)
        return value

    return loss


@each_trainer
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])  # MXNet itself clears the error that is seen
@pytest.mark.parametrize("at", [0, 2])
def test_after_an_operator_failed_the_next_run_is_as_if_none_had_been(at, ranks, how):
    sizes = [8, 7, 5, 8, 6]
    numpys, net, batches = NumPy(), network(2), arrays(examples(sizes))
    numpys.epoch(examples(sizes))
    with raises(mx.MXNetError, "potrf"):
        train(net, sgd(net, **TRAINERS[how]), batches, 2, loss=failing(at, ranks))
    mx.nd.waitall()
    for parameter, values in zip(net.collect_params().values(), start(), strict=True):
        parameter.set_data(array(values))
    train(net, sgd(net, **TRAINERS[how]), batches, 2)
    assert_weights(net, numpys.weights, 2)


def ends_otherwise(how):
    """What ends a run in whose queue an operator has failed, or will."""
    net = network(2)
    if how == "accuracy":
        net.add(gluon.nn.HybridLambda(lambda F, x: x + fails().as_in_context(x.context)))
        return mx.MXNetError, lambda: accuracy(net, arrays(examples([4] * 6)), cpus(2))

    def batches():
        yield from arrays(examples([5, 4]))
        if how == "interrupt":
            interrupt()
        raise RuntimeError("no more data")

    error = {"loader": RuntimeError, "interrupt": (KeyboardInterrupt, mx.MXNetError)}[how]
    return error, lambda: train(net, sgd(net), batches(), 2, loss=failing(1, [1]))


@pytest.mark.parametrize("how", ["accuracy", "loader", "interrupt"])
def test_however_a_run_ends_it_leaves_no_error_for_the_next(how):
    error, call = ends_otherwise(how)
    with pytest.raises(error):
        call()
    mx.nd.waitall()


def test_an_error_from_before_is_told_as_such_and_only_once():
    numpys, net = NumPy(), network(2)
    numpys.epoch(examples())
    trainer = sgd(net)
    fails()
    with raises(mx.MXNetError, "before", "failed", "cleared") as error:
        train(net, trainer, arrays(examples()), 2)
    assert "potrf" in str(error.value.__cause__)
    assert_weights(net, start(), 2)
    train(net, trainer, arrays(examples()), 2)
    assert_weights(net, numpys.weights, 2)


# ---------------------------------------------------------------------- devices that wait
# Each of these would hang or crash, so they run in another process, which is given up at last.

Sync = gluon.contrib.nn.SyncBatchNorm


class Mine(Sync):
    pass


class ByOperator(gluon.HybridBlock):
    """The operator itself, without Gluon's layer."""

    def __init__(self, devices):
        super().__init__()
        self.devices = devices
        with self.name_scope():
            for name in ("gamma", "beta", "mean", "var"):
                setattr(self, name, self.params.get(name, shape=(5,), init=mx.init.One()))
        self.mean.grad_req = self.var.grad_req = "null"

    def hybrid_forward(self, F, x, gamma, beta, mean, var):
        return F.contrib.SyncBatchNorm(x, gamma, beta, mean, var, ndev=self.devices,
                                       key=self.prefix, fix_gamma=False)


class Within(gluon.Block):
    """A block whose code can't be had as a graph, with the norm within."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        assert isinstance(x, mx.nd.NDArray)
        return self.norm(x)


def synchronised(k, *norms, hybrid=False):
    net = (gluon.nn.HybridSequential if hybrid else gluon.nn.Sequential)()
    net.add(gluon.nn.Dense(5, in_units=4))
    for norm in norms:
        net.add(norm)
    net.add(gluon.nn.Dense(3, in_units=5))
    net.initialize(mx.init.Zero(), ctx=cpus(k))
    rng = np.random.default_rng(7)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(array(rng.normal(size=parameter.shape), "float32"))
    if hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def from_a_file():
    net = synchronised(4, norm(4), hybrid=True)
    train(net, sgd(net), single([8]), 4)
    with tempfile.TemporaryDirectory() as folder:
        net.export(f"{folder}/net")
        return gluon.SymbolBlock.imports(f"{folder}/net-symbol.json", ["data"],
                                         f"{folder}/net-0000.params", ctx=cpus(4))


def norm(devices=4, kind=Sync, **more):
    return kind(in_channels=5, num_devices=devices, **more)


def single(sizes):
    return [(array(x, "float32"), array(y)) for x, y in examples(sizes)]


def twice():
    one = norm()
    return synchronised(4, one, one)


MEETINGS = {  # a network on four devices; sizes of batches; what is said, if it is refused
    "fewer than devices": (lambda: synchronised(4, norm()), [8, 2], "gave 2 examples for 4"),
    "fewer, first": (lambda: synchronised(4, norm()), [1, 8], "gave 1 examples for 4"),
    "uneven": (lambda: synchronised(4, norm()), [8, 6], "gave 6 examples for 4"),
    "hybridised": (lambda: synchronised(4, norm(), hybrid=True), [8, 2], "gave 2 examples"),
    "a subclass": (lambda: synchronised(4, norm(4, Mine)), [8, 2], "gave 2 examples"),
    "the operator": (lambda: synchronised(4, ByOperator(4)), [8, 2], "gave 2 examples"),
    "deep within": (lambda: synchronised(4, Within(Within(norm()))), [8, 2], "gave 2 examples"),
    "from a file": (from_a_file, [8, 2], "gave 2 examples"),
    "waits for more": (lambda: synchronised(4, norm(5)), [8], "num_devices=5, but there are 4"),
    "waits for fewer": (lambda: synchronised(4, norm(2)), [8], "num_devices=2, but there are 4"),
    "waits for none": (lambda: synchronised(4, norm(1)), [8], "num_devices=1, but there are 4"),
    "twice in a pass": (twice, [8], "is used twice in a forward pass"),
    "equal shards": (lambda: synchronised(4, norm()), [8, 4], None),
    "frozen statistics": (lambda: synchronised(4, norm(use_global_stats=True)), [8, 2], None),
}


def meet():
    for what, (make, sizes, _) in MEETINGS.items():
        net = make()
        before, said = replicas(net), None
        try:
            train(net, sgd(net), single(sizes), 4)
        except ValueError as error:
            said = str(error)
        whole = make() if what == "fewer than devices" else None
        if whole:
            train(whole, sgd(whole), single(sizes[:1]), 4)
        apart = whole and apart_by(replicas(net), replicas(whole))
        tell(what, said, flat(replicas(net)) == flat(before), apart)

    one, four = synchronised(1, gluon.nn.BatchNorm(in_channels=5)), synchronised(4, norm())
    before, batches = weights_of(one), single([8, 12, 8])
    plain_epoch(one, sgd(one), ENTROPY, batches)
    train(four, sgd(four), batches, 4)
    tell("as on one device", apart_by(weights_of(four), weights_of(one) * 4),
         apart_by(before, weights_of(one)))
    lonely = synchronised(1, norm(1))
    train(lonely, sgd(lonely), single([3, 1]), 1)  # one device waits for nobody


def weights_of(net):
    """As `replicas`, without running statistics."""
    every = [[a.asnumpy() for a in p.list_data()] for p in net.collect_params().values()
             if p.grad_req != "null"]
    return [list(weights) for weights in zip(*every, strict=True)]


def apart_by(ours, others):
    """The largest difference, over all devices and weights."""
    pairs = [pair for both in zip(ours, others) for pair in zip(*both, strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def end_if_it_hangs(process):
    """Kill it when it has computed nothing for 15 seconds; a slow one goes on."""
    used, still = -1.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.poll() is None and still < 15:
            time.sleep(1)
            now = sum(psutil.Process(process.pid).cpu_times()[:2])
            still = still + 1 if now - used < 0.01 else 0
            used = now
    process.kill()


@pytest.fixture(scope="module")
def meetings():
    process = child("meet()")
    threading.Thread(target=end_if_it_hangs, args=[process], daemon=True).start()
    out, err = process.communicate()
    return {what: rest for what, *rest in map(json.loads, out.splitlines())}, err


@pytest.mark.parametrize("what", MEETINGS)
def test_where_devices_wait_for_each_other_all_come_or_it_is_refused(what, meetings):
    found, err = meetings
    assert what in found, f"hangs or crashes, or one before it: {err}"
    said, unchanged, apart = found[what]
    expected, (first, *_) = MEETINGS[what][2], MEETINGS[what][1]
    if expected is None:
        assert said is None and not unchanged
        return
    assert said and expected in said
    assert "fit(" in said and ("eeds" in said or "use two layers" in said)
    a_step_was_made = "gave" in expected and first == 8
    assert unchanged == (not a_step_was_made)
    assert apart is None or apart < 1e-5, "the step before it is whole"


def test_where_devices_wait_and_shards_are_equal_it_is_as_on_one_device(meetings):
    """One device with the whole batch and Gluon's own BatchNorm, in float32, which Sync needs."""
    apart, changed = meetings[0]["as on one device"]
    assert apart < 1e-5 < 1e-3 < changed


# ---------------------------------------------------------------------- the queue


class Gate(mx.operator.CustomOp):
    """Holds a shard back until its step, the number in the first column, may pass."""

    change = threading.Condition()
    waiting = may_pass = 0

    def forward(self, is_train, req, in_data, out_data, aux):
        step = in_data[0][0, 0].asscalar()
        with Gate.change:
            Gate.waiting += 1
            Gate.change.wait_for(lambda: step < Gate.may_pass)
            Gate.waiting -= 1
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("test_training_gate")
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, in_shapes, in_dtypes):
        return Gate()


def let_pass(steps):
    with Gate.change:
        Gate.may_pass = steps
        Gate.change.notify_all()


def gate(x):
    return mx.nd.Custom(x, op_type="test_training_gate")


@pytest.fixture
def gated():
    """A network behind the gate, on so many devices."""
    let_pass(0)
    for _ in range(12):  # MXNet makes threads for custom operators as they queue up
        gate(mx.nd.zeros((1, 1)))
    assert soon(lambda: Gate.waiting >= 8)
    let_pass(1)
    mx.nd.waitall()
    let_pass(0)

    def make(k):
        net = gluon.nn.Sequential()
        net.add(gluon.nn.Lambda(lambda x: gate(x)[:, 1:]), network(k))
        return net

    yield make
    let_pass(math.inf)
    mx.nd.waitall()


def numbered(batches, first=0):
    """With each batch's step in an additional column."""
    return [(array(np.insert(x, 0, step, axis=1)), array(y))
            for step, (x, y) in enumerate(batches, first)]


def soon(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def under_way(make, k, what="fit", steps=12):
    """Training or judging in a thread; gives the list of the batches that it has asked for."""
    net, asked = make(k), []

    def counted():
        for batch in numbered(examples([4] * steps)):
            asked.append(batch)
            yield batch

    calls = {"fit": lambda: train(net, sgd(net), counted(), k),
             "accuracy": lambda: accuracy(net, counted(), cpus(k))}
    thread = threading.Thread(target=calls[what], daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        let_pass(math.inf)
        thread.join(30)
    assert not thread.is_alive() and len(asked) == steps


def stops_at(asked, count):
    assert soon(lambda: len(asked) >= count)  # it does run ahead
    time.sleep(0.3)
    return len(asked) == count  # and no further


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("what", ["fit", "accuracy"])
def test_no_more_than_three_steps_are_under_way(k, what, gated, monkeypatch):
    """With the gate shut no step ends, so Python has to stop and wait."""
    monkeypatch.setattr(training, "QUEUED", 0)
    with under_way(gated, k, what) as asked:
        for done in range(9):
            assert stops_at(asked, done + 3) if done in (0, 1, 8) else soon(
                lambda least=done + 3: len(asked) >= least)
            let_pass(done + 1)


def test_short_steps_are_read_in_bursts_and_only_so_many_are_under_way(gated, monkeypatch):
    monkeypatch.setattr(training, "QUEUED", 1e9)
    monkeypatch.setattr(training, "MOST", 5)
    with under_way(gated, 2) as asked:
        assert stops_at(asked, 3), "how long a step takes is not known yet"
        let_pass(1)
        assert stops_at(asked, 1 + 5)
        let_pass(3)
        assert stops_at(asked, 1 + 5), "it reads until two are left"
        let_pass(4)
        assert stops_at(asked, 4 + 5)


def test_of_long_steps_no_more_than_three_are_under_way(gated):
    with under_way(gated, 2) as asked:
        assert soon(lambda: len(asked) == 3)
        time.sleep(training.QUEUED + 0.2)
        let_pass(1)
        assert stops_at(asked, 1 + 3)


# ---------------------------------------------------------------------- interrupts
# Real signals: SIGINT, raised in this process at chosen moments, or sent to another one.

SHORT = [5, 4, 1]


@pytest.fixture(autouse=True)
def handler():
    """Python's own handler, and what a test leaves behind is put right."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler


def interrupt():
    signal.raise_signal(signal.SIGINT)


def after_each_step(sizes=SHORT, **how):
    """The weights of a plain run after 0, 1, ... steps."""
    net = network(2)
    trainer, weights = sgd(net, **how), [replicas(net)]
    for batch in arrays(examples(sizes)):
        train(net, trainer, [batch], 2)
        weights.append(replicas(net))
    return weights


def flat(weights):
    """All of them, to be compared bit for bit."""
    return b"".join(w.tobytes() for replica in weights for w in replica)


class AtLine:
    """Calls `act` before the line of this number, of all that the block runs outside this file.

    Python loses what is raised in a `__del__` or by the garbage collector, so not there."""

    def __init__(self, number, act):
        self.number, self.act, self.lines, self.done = number, act, 0, False

    def __enter__(self):
        gc.disable()
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)
        gc.enable()

    def _trace(self, frame, event, arg):
        if event == "line" and frame.f_code.co_filename != __file__:
            self.lines += 1
            if self.lines >= self.number and not self.done:
                caller = frame
                while caller and caller.f_code.co_name != "__del__":
                    caller = caller.f_back
                if caller is None:
                    self.done = True
                    self.act()
        return self._trace


# What an exception leaves half made may fail again while it is thrown away.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@each_trainer
def test_an_interrupt_at_any_moment_leaves_whole_steps_and_training_goes_on(how, handler, capfd):
    batches, how, moments = arrays(examples(SHORT)), TRAINERS[how], 60
    expected = [flat(weights) for weights in after_each_step(**how)]
    more = {"test": batches[:1], "progress": True}

    def interrupted_at(moment):
        net = network(2)
        trainer, interrupted = sgd(net, **how), False
        with AtLine(moment, interrupt) as at:
            try:
                train(net, trainer, batches, 2, **more)
            except KeyboardInterrupt:
                interrupted = True
        assert interrupted == at.done, f"swallowed at line {moment}"
        assert mx.context.current_context() == mx.cpu(0), f"another context after line {moment}"
        assert signal.getsignal(signal.SIGINT) is handler
        assert flat(replicas(net)) in expected, f"half a step at line {moment}"
        steps = expected.index(flat(replicas(net)))
        if rest := batches[steps:]:
            train(net, trainer, rest, 2)
        assert flat(replicas(net)) == expected[-1]
        return at.lines, steps, interrupted

    interrupted_at(math.inf)  # with more lines, the first time
    lines, steps, _ = interrupted_at(math.inf)
    assert steps == 3
    # How often the bar is drawn depends on time, so the last moment may come too late.
    all_ = [interrupted_at(moment) for moment in np.linspace(1, lines, moments).astype(int)]
    assert {steps for _, steps, interrupted in all_ if interrupted} == {0, 1, 2, 3}
    net = network(2)
    thread = threading.Thread(target=lambda: train(net, sgd(net), batches, 2, **more), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "an interrupt left a lock of the progress bar shut"


def within_a_step(at, act):
    """A loss, on two devices, that calls `act` in a step's middle: on the second device."""
    entropy, calls = gluon.loss.SoftmaxCrossEntropyLoss(), iter(range(10**6))

    def loss(out, y):
        if next(calls) == 2 * at + 1:
            act()
        return entropy(out, y)

    return loss


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_takes_effect_at_the_steps_end(at, handler):
    sizes, then = [5, 4, 6], []
    expected, net = after_each_step(sizes), network(2)
    loss = within_a_step(at, lambda: (interrupt(), time.sleep(0), then.append("went on")))
    with pytest.raises(KeyboardInterrupt, match="between two steps") as error:
        train(net, sgd(net), arrays(examples(sizes)), 2, loss=loss)
    assert error.value.__suppress_context__ and error.traceback[-1].name == "fit", "a short story"
    assert then == ["went on"]
    assert flat(replicas(net)) == flat(expected[at + 1])
    assert signal.getsignal(signal.SIGINT) is handler


def press_in_step(trainer, number):
    """Interrupts this step of the trainer, from 1, when half of its parameters are updated."""
    trainer._init_kvstore()
    pushpull, calls = trainer._kvstore.pushpull, []
    half = (number - 1) * len(trainer._params) + len(trainer._params) // 2

    def pushpull_and_press(*args, **options):
        pushpull(*args, **options)
        calls.append(1)
        if len(calls) == half:
            interrupt()

    trainer._kvstore.pushpull = pushpull_and_press


def test_replicas_are_equal_after_half_a_step_too_and_fit_makes_it_a_whole_one(handler):
    """So comparing them doesn't show that a plain loop was stopped within a step."""
    sizes = [4, 6, 8]
    expected = after_each_step(sizes)

    def plain_loop(net, trainer):
        for x, y in arrays(examples(sizes)):
            plain_step(net, trainer, x, y, 2)

    def by_fit(net, trainer):
        train(net, trainer, arrays(examples(sizes)), 2)

    ended = {}
    for loop in (plain_loop, by_fit):
        net = network(2)
        trainer = sgd(net)
        press_in_step(trainer, 2)
        with pytest.raises(KeyboardInterrupt):
            loop(net, trainer)
        assert_same_parameters(net)
        ended[loop] = replicas(net)[0]
    assert flat([ended[by_fit]]) == flat(expected[2][:1]), "fit ends the step"
    for place, weights in enumerate(ended[plain_loop]):
        made = 2 if place < 2 else 1  # steps
        assert (weights == expected[made][0][place]).all()
        assert (weights != expected[3 - made][0][place]).any(), "the step changes it"


def test_who_handles_interrupts_gets_them_after_the_step():
    came, net, sizes = [], network(2), [5, 4, 6]

    def mine(*signal_and_frame):
        came.append((signal_and_frame[0], len(asked)))

    asked = []

    def batches():
        for batch in arrays(examples(sizes)):
            asked.append(batch)
            yield batch

    previous = signal.signal(signal.SIGINT, mine)
    try:
        history = train(net, sgd(net), batches(), 2, loss=within_a_step(1, interrupt))
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        fit(net, sgd(net), arrays(examples(sizes)), cpus(2), progress=False,
            loss=within_a_step(1, interrupt))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("raised, not handed on")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert came == [(signal.SIGINT, 2)]
    assert len(history.losses) == 3


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_while_batches_are_made(at, handler):
    def batches():
        for step, batch in enumerate([*arrays(examples(SHORT)), None]):
            if step == at:
                interrupt()
            if batch:
                yield batch

    net = network(2)
    with pytest.raises(KeyboardInterrupt):
        train(net, sgd(net), batches(), 2)
    assert flat(replicas(net)) == flat(after_each_step()[at])
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_before_the_shapes_are_known():
    net = gluon.nn.Dense(3)
    net.initialize(ctx=cpus(2))

    def batches():
        interrupt()
        yield from arrays(examples(SHORT))

    with pytest.raises(KeyboardInterrupt):
        train(net, sgd(net), batches(), 2)
    assert net.weight.list_ctx() == cpus(2)


def test_an_interrupt_between_epochs_waits_for_all_that_was_begun(gated):
    """During `test`, with two of its batches before a gate that somebody opens later."""
    net, opened = gated(2), threading.Event()
    later = threading.Timer(0.5, lambda: (opened.set(), let_pass(5)))

    def test():
        yield from numbered(examples([4, 4]), 3)
        later.start()
        interrupt()

    let_pass(3)
    with pytest.raises(KeyboardInterrupt):
        train(net, sgd(net), numbered(examples([4, 4, 4])), 2, test=test())
    assert opened.is_set()
    later.join()
    assert flat(replicas(net)) == flat(after_each_step([4, 4, 4])[-1])


def test_replicas_that_have_parted_are_noticed_at_an_interrupt_too():
    net = network(2)
    with pytest.raises(BaseException, match="differ") as error:  # KeyboardInterrupt ends pytest
        train(net, sgd(net, kvstore=None), arrays(examples([5, 4])), 2,
              loss=within_a_step(0, interrupt))
    assert error.type is AssertionError


def test_training_in_another_thread(handler):
    numpys, net, done = NumPy(), network(2), []
    numpys.epoch(examples())
    trainer = sgd(net)
    thread = threading.Thread(
        target=lambda: done.append(train(net, trainer, arrays(examples()), 2)))
    thread.start()
    thread.join(60)
    assert_history(done[0], numpys, sum(SIZES))
    assert_weights(net, numpys.weights, 2)
    assert signal.getsignal(signal.SIGINT) is handler


def steps_to_stop(call, given, least, send):
    """How many batches are given between a signal and `call`'s KeyboardInterrupt.

    Another thread sends it once `given`, a list, has `least` batches. Python loses one that comes
    during a `__del__`, so after a while there is another."""
    stopped, sent = threading.Event(), []

    def sender():
        while len(given) < least:
            time.sleep(0.001)
        while not stopped.is_set():
            sent.append(len(given))
            send()
            stopped.wait(3)

    thread = threading.Thread(target=sender)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        call()
    stopped.set()
    thread.join()
    return len(given) - sent[-1]


class Given:
    """Batches that are counted as they are given, epoch after epoch."""

    def __init__(self, batches):
        self.batches, self.list = batches, []

    def __iter__(self):
        for batch in self.batches:
            self.list.append(None)
            yield batch


def interrupt_lenet():
    """Tells how many steps it took to stop, and after which whole steps the weights are these."""
    sys.setswitchinterval(10)  # no step between counting the batches and sending the signal
    rng, net = np.random.default_rng(0), lenet(2)
    batch = (array(rng.normal(size=(64, 1, 28, 28)), "float32"),
             array(rng.integers(0, 10, 64), "int32"))
    first = [p.data(mx.cpu(0)).copy() for p in net.collect_params().values()]

    def begin():
        for parameter, values in zip(net.collect_params().values(), first, strict=True):
            parameter.set_data(values)
        return sgd(net, 0.01)

    def endless(given):
        while True:
            given.append(batch)
            yield batch

    def stopped(least):
        trainer, given = begin(), []
        took = steps_to_stop(lambda: train(net, trainer, endless(given), 2), given, least,
                             lambda: os.kill(os.getpid(), signal.SIGINT))
        return took, len(given), flat(replicas(net))

    stops = [stopped(least) for least in (1, 2, 3, 4, 6, 9, 14, 20)]
    trainer, plain = begin(), [flat(replicas(net))]
    for _ in range(max(given for _, given, _ in stops)):
        plain_step(net, trainer, *batch, 2)
        plain.append(flat(replicas(net)))
    for took, given, weights in stops:
        # The last batch may have been given for a step that didn't begin any more.
        whole = [step for step in (given - 1, given) if step >= 0 and plain[step] == weights]
        tell("lenet", took, whole)


def interrupt_group():
    """Signals go to the whole process group, as when somebody presses Ctrl-C; one ends it."""
    interrupt_lenet()
    x, y = examples([64])[0]
    net = network(2)
    trainer = sgd(net, 0.01)
    data = gluon.data.ArrayDataset(x, y)
    for workers in ("threads", "processes"):
        loader = gluon.data.DataLoader(data, batch_size=8, num_workers=2,
                                       thread_pool=workers == "threads")
        for least in (1, 20, 60):
            some = Given(loader)
            took = steps_to_stop(lambda some=some: train(net, trainer, some, 2, epochs=10**9),
                                 some.list, least, lambda: os.killpg(0, signal.SIGINT))
            history = train(net, trainer, loader, 2, test=loader)
            expected = accuracy(net, [(array(x), array(y))], cpus(2))
            assert history.test_accuracy == [expected]
            tell(workers, took, len(history.losses))

    def end():
        while True:
            time.sleep(0.3)
            os.killpg(0, signal.SIGINT)
            time.sleep(6)  # see steps_to_stop

    threading.Thread(target=end, daemon=True).start()
    train(net, trainer, loader, 2, epochs=10**9)


def tell(*what):
    print(json.dumps(what), flush=True)


@pytest.fixture(scope="module")
def stops():
    process = child("interrupt_group()", group=True)
    try:
        out, err = process.communicate(timeout=180)  # until the last worker has closed its stdout
        yield process, [json.loads(line) for line in out.splitlines()], err
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_lenet_stops_at_once_after_whole_steps(stops):
    took, whole = zip(*[rest for what, *rest in stops[1] if what == "lenet"], strict=True)
    assert took == (0,) * 8, "no step begins after a signal"
    assert all(len(steps) == 1 for steps in whole), f"not whole steps: {whole}"
    assert max(whole) > min(whole)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_training_stops_and_goes_on_with_a_dataloader_that_has_workers(stops, workers):
    took, steps = zip(*[rest for what, *rest in stops[1] if what == workers], strict=True)
    assert took == (0,) * 3, "no step begins after a signal"
    assert steps == (8, 8, 8)


def test_an_interrupt_ends_a_program_and_the_workers_of_its_dataloader(stops):
    process, _, err = stops
    assert process.returncode == -signal.SIGINT and "\nKeyboardInterrupt" in err, err
    assert soon(lambda: not group(process.pid))


def group(number):
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == number and process.info["status"] != "zombie":
                found.append(process)
    return found
