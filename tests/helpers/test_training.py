"""`fit` against Gluon's plain loop on one device and closed forms; interrupts at any moment."""

import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from helpers import training  # first, so that MXNet finds its settings

# isort: split
import mxnet as mx
import numpy as np
import pytest
from common import cpus, raises
from mxnet import autograd, gluon, npx

from helpers.training import Batches, accuracy, assert_same_parameters, fit

# Whole batches and uneven ones; 2 and 1 leave devices idle, and something comes after each.
SIZES = [1, 8, 7, 2, 8, 1, 6]
SHORT = [5, 4, 1]
ENTROPY = gluon.loss.SoftmaxCrossEntropyLoss()
RATE, MOMENTUM = 0.25, 0.875  # MXNet rounds them to float32: these it keeps


def array(values, dtype=None):
    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return make(values, dtype=dtype or values.dtype)


def examples(sizes=SIZES, seed=0, dtype="float64"):
    """Batches of so many examples of four numbers, with labels 0 to 2."""
    rng = np.random.default_rng(seed)
    pairs = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n).astype("int32")) for n in sizes]
    return [(array(x, dtype), array(y)) for x, y in pairs]


def start(net):
    """Set all trained weights, the same ones each time."""
    rng = np.random.default_rng(7)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(array(rng.normal(size=parameter.shape), parameter.dtype))


def network(k, hybrid=False):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, activation="tanh", in_units=4), gluon.nn.Dense(3, in_units=5))
    net.cast("float64")
    net.initialize(mx.init.Zero(), ctx=cpus(k))
    start(net)
    if hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def sgd(params, **how):
    params = params.collect_params() if isinstance(params, gluon.Block) else params
    return gluon.Trainer(params, "sgd", {"learning_rate": RATE, "momentum": MOMENTUM}, **how)


def train(net, trainer, batches, k, **more):
    return fit(net, trainer, batches, cpus(k), **{"progress": False} | more)


def right(net, x, y):
    """How many answers of the first device are right, counted by NumPy."""
    return (net(x).asnumpy().argmax(axis=1) == y.asnumpy().ravel()).sum()


def plain(net, trainer, batches, loss=ENTROPY, epochs=1):
    """One device, as in MXNet's own documents; returns all losses, and each epoch's accuracy."""
    losses, shares = [], []
    for _ in range(epochs):
        shares.append(sum(0 * len(x) for x, _ in batches))
        for x, y in batches:
            shares[-1] += right(net, x, y)
            with autograd.record():
                value = loss(net(x), y)
            value.backward()
            trainer.step(len(x))
            losses.append(value.asnumpy().mean())
        shares[-1] /= sum(len(x) for x, _ in batches)
    return losses, shares


def weights(net):
    """The trained weights of each device, as a list for each."""
    every = [[a.asnumpy() for a in p.list_data()] for p in net.collect_params().values()
             if p.grad_req != "null"]
    return [list(replica) for replica in zip(*every, strict=True)]


def flat(net):
    """All of them, to be compared bit for bit."""
    return b"".join(w.tobytes() for replica in weights(net) for w in replica)


def assert_weights(net, expected):
    """Each device has those of `expected`, a list of arrays, but for rounding."""
    for replica in weights(net):
        for ours, theirs in zip(replica, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * np.abs(theirs).max())


@pytest.fixture
def np_mode():
    npx.set_np()
    yield
    npx.reset_np()


# ---------------------------------------------------------------------- as on one device


def as_in_a_plain_loop(k, how, hybrid):
    """Two epochs with momentum, in each of them idle devices, and an accuracy after each."""
    batches, test, one = examples(), examples([9, 4, 1], seed=1), network(1)
    losses, shares = plain(one, sgd(one), batches, epochs=2)
    net = network(k, hybrid)
    history = train(net, sgd(net, **how), batches, k, epochs=2, test=test)
    assert_weights(net, weights(one)[0])
    np.testing.assert_allclose(history.losses, losses, rtol=1e-12)
    np.testing.assert_allclose(history.train_accuracy, shares)
    assert history.test_accuracy[-1] == sum(right(one, *batch) for batch in test) / 14
    assert len(history.seconds) == len(history.test_accuracy) == 2
    assert np.allclose(np.multiply(history.seconds, history.rate), sum(SIZES))


@pytest.mark.parametrize(("k", "how", "hybrid"), [
    (1, {}, False), (2, {}, False), (4, {}, True), (4, {"update_on_kvstore": False}, False)])
def test_weights_losses_and_accuracies_are_those_of_a_plain_loop(k, how, hybrid):
    as_in_a_plain_loop(k, how, hybrid)


def test_so_they_are_with_mx_np_arrays_which_batches_give_then(np_mode):
    as_in_a_plain_loop(3, {}, hybrid=True)
    batches = Batches(np.arange(5.0), np.arange(5), 2)
    assert {type(a) for batch in batches for a in batch} == {mx.np.ndarray}
    x, y = content(batches)
    assert (x == y).all() and sorted(y) == list(range(5))


class WithWeights(gluon.loss.Loss):
    """Whose weights the trainer changes too; they aren't the network's."""

    def __init__(self, k):
        super().__init__(None, 0)
        with self.name_scope():
            self.last = gluon.nn.Dense(3, in_units=3)
        self.cast("float64")
        self.initialize(mx.init.Zero(), ctx=cpus(k))
        start(self)

    def hybrid_forward(self, F, out, y):
        return F.pick(-F.log_softmax(self.last(out)), y)


def test_idle_devices_count_nothing_twice_frozen_weights_stay_and_a_losss_own_are_trained():
    every = []
    for k in (1, 4):
        net, loss = network(k), WithWeights(k)
        net[0].bias.grad_req = "null"
        trainer = sgd({**net.collect_params(), **loss.collect_params()})
        if k == 1:
            plain(net, trainer, examples(), loss)
        else:
            train(net, trainer, examples(), k, loss=loss)
        every.append((net, loss))
    for theirs, ours in zip(*every):
        assert_weights(ours, weights(theirs)[0])
    assert (net[0].bias.data(mx.cpu(3)) == network(1)[0].bias.data()).asnumpy().all()


def test_a_dataloader_and_a_stand_in_for_a_trainer():
    class Twice:
        def __init__(self, trainer):
            self.trainer = trainer

        def step(self, size):
            self.trainer.step(size / 2)

    one, net, batches = network(1), network(3), examples([5, 5, 2])
    plain(one, Twice(sgd(one)), batches)
    x, y = (np.concatenate([a.asnumpy() for a in part]) for part in zip(*batches))
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), batch_size=5)
    train(net, Twice(sgd(net)), loader, 3)
    assert_weights(net, weights(one)[0])


def test_a_network_that_learns_its_shapes_from_a_batch_too_small_for_all():
    every = []
    for k in (1, 3):
        net = gluon.nn.Dense(3)
        net.cast("float64")
        net.initialize(mx.init.Constant(0.1), ctx=cpus(k))
        every.append(net)
    plain(every[0], sgd(every[0]), examples([1, 8]))
    train(every[1], sgd(every[1]), examples([1, 8]), 3)
    assert_weights(every[1], weights(every[0])[0])


def test_regression_is_as_in_closed_form_and_has_no_accuracy():
    net, rng = gluon.nn.Dense(2, in_units=4), np.random.default_rng(0)
    net.cast("float64")
    net.initialize(mx.init.Zero(), ctx=cpus(3))
    batches = [(rng.normal(size=(n, 4)), rng.normal(size=(n, 2))) for n in (8, 2)]
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    history = train(net, trainer, [(array(x), array(y)) for x, y in batches], 3,
                    loss=gluon.loss.L2Loss())
    weight, bias, losses = np.zeros((2, 4)), np.zeros(2), []
    for x, y in batches:
        error = x @ weight.T + bias - y
        losses.append((error**2).mean() / 2)
        weight = weight - RATE / len(x) / 2 * error.T @ x
        bias = bias - RATE / len(x) / 2 * error.sum(axis=0)
    assert_weights(net, [weight, bias])
    np.testing.assert_allclose(history.losses, losses)
    assert np.isnan(history.train_accuracy).all()


def test_labels_may_be_a_column_and_one_hot_ones_have_no_accuracy():
    (x, y), one = examples([3])[0], network(1)
    losses, shares = plain(one, sgd(one), [(x, y)])
    # Of three rows and three classes: each answer could be compared with each label's digits.
    digits = array(np.eye(3)[y.asnumpy()])
    for labels, loss, share in [(y.expand_dims(1), ENTROPY, shares[0]), (
            digits, gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False), math.nan)]:
        net = network(2)
        history = train(net, sgd(net), [(x, labels)], 2, loss=loss)
        assert_weights(net, weights(one)[0])
        np.testing.assert_equal(history.train_accuracy, [share])


def test_accuracy_asks_every_device():
    """On each, another class always wins."""
    net = network(3)
    for rank, bias in enumerate(net[1].bias.list_data()):
        bias[:] = array(1e3 * np.eye(3)[rank])
    for labels in ([0, 0, 0, 1, 1, 2, 2], [0, 1]):
        batch = array(np.zeros((len(labels), 4))), array(np.array(labels, "int32"))
        assert accuracy(net, [batch], cpus(3)) == 1
    batch = array(np.zeros((3, 4))), array(np.array([0, 1, 1], "int32"))
    assert accuracy(net, [batch], cpus(3)) == 2 / 3


def test_the_bar_is_on_stdout_and_only_if_asked(capfd):
    net = network(2)
    train(net, sgd(net), examples(), 2)
    assert capfd.readouterr() == ("", "")
    train(net, sgd(net), examples(), 2, progress=True, epochs=2, title="two")
    out, err = capfd.readouterr()
    assert "two epoch 2/2" in out and err == ""


@pytest.mark.parametrize(("seconds", "most"), [(0, 3), (1e9, 5)])
def test_only_so_many_steps_are_under_way(monkeypatch, seconds, most):
    """Or thousands would pile up in the engine's queues."""
    begun, unread = [], []
    read = training._read
    monkeypatch.setattr(training, "QUEUED", seconds)
    monkeypatch.setattr(training, "MOST", 5)
    monkeypatch.setattr(training, "_read", lambda step: (
        unread.append(len(begun) - len(unread)), read(step))[1])

    def batches():
        for batch in examples([4] * 20):
            begun.append(1)
            yield batch

    net = network(2)
    assert len(train(net, sgd(net), batches(), 2).losses) == 20
    assert max(unread) == most


# ---------------------------------------------------------------------- the batches


def content(batches):
    """All images and all labels of an epoch, in their order."""
    pairs = [(x.asnumpy(), y.asnumpy()) for x, y in batches]
    return [np.concatenate(part) for part in zip(*pairs)]


def test_an_epoch_has_every_example_once_with_its_label_and_type():
    images = np.arange(20, dtype="float64").reshape(10, 2)
    labels = np.arange(10, dtype="uint8")
    for given in ((images, labels), [mx.nd.array(a, mx.cpu(1), a.dtype) for a in (images, labels)]):
        batches = Batches(*given, 4)
        assert [(x.shape, len(y)) for x, y in batches] == [((4, 2), 4), ((4, 2), 4), ((2, 2), 2)]
        assert len(batches) == 3
        x, y = content(batches)
        assert (x.dtype, y.dtype) == ("float64", "uint8")
        assert sorted(y) == list(labels) and (x == images[y]).all()
        assert {a.context for batch in batches for a in batch} == {mx.cpu(0)}


def test_another_order_each_epoch_and_the_same_ones_with_the_same_seed():
    def orders(**settings):
        batches = Batches(np.zeros((50, 1)), np.arange(50), 8, **settings)
        return [content(batches)[1].tolist() for _ in range(3)]

    first = orders(seed=3)
    np.random.seed(1)
    assert orders(seed=3) == first
    assert len({tuple(order) for order in [*first, *orders()]}) == 6
    assert orders(shuffle=False) == [list(range(50))] * 3


def test_batches_that_can_not_be():
    with raises(ValueError, "5 images but 4 labels"):
        Batches(np.zeros((5, 1)), np.zeros(4), 2)
    with raises(ValueError, "size=0", "at least one a batch"):
        Batches(np.zeros((5, 1)), np.zeros(5), 0)


# ---------------------------------------------------------------------- what goes wrong


def test_a_loss_that_is_nan_names_its_step_of_all_epochs():
    class Epochs:
        def __init__(self):
            self.left = [examples(), examples()]
            self.left[1][1][0][-1, 0] = math.nan  # one number, on the last device in use

        def __iter__(self):
            return iter(self.left.pop(0))

    net = network(3)
    with raises(FloatingPointError, f"the loss is nan at step {len(SIZES) + 1}:", "learning rate"):
        train(net, sgd(net), Epochs(), 3, epochs=2)


def test_a_nan_that_the_loss_does_not_show_is_found_in_the_weights():
    """MXNet's relu makes 0 of NaN; the gradient of the weight before it is NaN all the same."""
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(5, activation="relu", in_units=4), gluon.nn.Dense(3, in_units=5))
    net.initialize(ctx=cpus(2))
    batches = examples(dtype="float32")
    batches[2][0][-1, 0] = math.nan
    with raises(FloatingPointError, f"{net[0].weight.name} has entries that are not finite"):
        train(net, sgd(net), batches, 2, epochs=2)


def test_replicas_that_part_are_noticed_and_named():
    net = network(2)
    name = next(iter(net.collect_params()))
    with raises(AssertionError, f"{name}: ", "cpu\\(0\\) and cpu\\(1\\) differ"):
        train(net, sgd(net, kvstore=None), examples(), 2)


def test_a_single_changed_weight_is_found_and_running_statistics_may_differ():
    net = gluon.nn.Sequential()
    net.add(gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(3, in_units=4))
    net.initialize(ctx=cpus(2))
    train(net, sgd(net), examples(dtype="float32"), 2)
    means = [a.asnumpy() for a in net[0].running_mean.list_data()]
    assert np.abs(means[0] - means[1]).max() > 1e-3
    assert_same_parameters(net)
    largest = net[1].weight.data(mx.cpu(0)).abs().max().asscalar()
    net[1].weight.data(mx.cpu(1))[2, 3] += 0.01 * largest
    with pytest.raises(AssertionError, match=net[1].weight.name):
        assert_same_parameters(net, tolerance=0.009)
    assert_same_parameters(net, tolerance=0.011)


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [2, 3], [0, 1, 1], []])
def test_devices_that_are_not_the_networks_are_refused(ranks):
    """One left out would fall behind."""
    net, chosen = network(2), [mx.cpu(rank) for rank in ranks]
    for call in (lambda: fit(net, sgd(net), examples(), chosen, progress=False),
                 lambda: accuracy(net, examples(), chosen)):
        with raises(ValueError, "devices=", "is on \\['cpu\\(0\\)', 'cpu\\(1\\)'\\]"):
            call()
    assert flat(net) == flat(network(2))


def test_a_trainer_from_before_the_network_moved_is_refused():
    net = network(2)
    trainer = sgd(net)
    train(net, trainer, examples([4]), 2)
    net.initialize(mx.init.Zero(), ctx=cpus(3), force_reinit=True)  # a step would crash
    with raises(ValueError, "devices=", "the trainer is on \\['cpu\\(0\\)', 'cpu\\(1\\)'\\]"):
        train(net, trainer, examples(), 3)


def test_gradients_that_are_added_up_are_refused():
    net = network(2)
    net[1].weight.grad_req = "add"
    with raises(ValueError, net[1].weight.name, "grad_req='add'", "'write'"):
        train(net, sgd(net), examples(), 2)


X, Y = examples([8])[0]


@pytest.mark.parametrize(("batches", "error", "words"), [
    (mx.io.NDArrayIter(X, Y, 4), TypeError, "gave DataBatch"),
    ([X[:2]], TypeError, "gave NDArray"),  # two examples and no labels: it could be unpacked
    ([(X, Y, Y)], TypeError, "gave \\['NDArray', 'NDArray', 'NDArray'\\]"),
    ([(X, Y.asnumpy())], TypeError, "gave \\['NDArray', 'ndarray'\\]"),
    ([(X, Y[:7])], ValueError, "x \\(8, 4\\) and y \\(7,\\)"),
    (iter(()), ValueError, "no batch"),
], ids=["NDArrayIter", "no labels", "three", "NumPy", "lengths", "used up"])
def test_batches_are_pairs_of_arrays_and_what_else_came_is_named(batches, error, words):
    net = network(2)
    with raises(error, "fit\\(batches\\)", words):
        train(net, sgd(net), batches, 2)
    with raises(error, "accuracy\\(batches\\)", words):
        if hasattr(batches, "reset"):
            batches.reset()
        accuracy(net, batches, cpus(2))
    assert flat(net) == flat(network(2))


def test_a_loss_has_one_number_for_each_example():
    net = network(2)
    for loss in (lambda out, y: ENTROPY(out, y).mean(), lambda out, y: ENTROPY(out, y).sum(),
                 lambda out, y: out * out, gluon.loss.SoftmaxCELoss(batch_axis=1)):
        with raises(ValueError, "fit\\(loss\\)", "for 4 examples"):
            train(net, sgd(net), [(X, Y)], 2, loss=loss)
    assert flat(net) == flat(network(2))
    train(net, sgd(net), [(X, Y)], 2, loss=lambda out, y: ENTROPY(out, y).expand_dims(1))
    one = network(1)
    plain(one, sgd(one), [(X, Y)])
    assert_weights(net, weights(one)[0])


# ---------------------------------------------------------------------- errors in operators


def fails(device):
    """An operator that fails when a device comes to it: no matrix like that has a root."""
    return mx.nd.linalg.potrf(-mx.nd.ones((1, 1), ctx=device, dtype="float64")).sum()


@pytest.mark.parametrize("rank", [0, 1])  # MXNet itself clears only the error that is seen
def test_after_an_operator_failed_the_next_run_is_as_if_none_had_been(rank):
    calls, one, net = itertools.count(), network(1), network(2)

    def loss(out, y):
        value = ENTROPY(out, y)
        return value * fails(out.context) if next(calls) == 4 + rank else value  # in step 2

    with raises(mx.MXNetError, "potrf"):
        train(net, sgd(net), examples([8, 7, 5, 8]), 2, loss=loss)
    mx.nd.waitall()
    start(net)
    train(net, sgd(net), examples([8, 7, 5, 8]), 2)
    plain(one, sgd(one), examples([8, 7, 5, 8]))
    assert_weights(net, weights(one)[0])


def test_however_a_call_ends_it_leaves_no_error_for_the_next():
    net = network(2)

    def batches():
        yield from examples([5, 4])
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError):
        train(net, sgd(net), batches(), 2, loss=lambda out, y: ENTROPY(out, y) * fails(y.context))
    mx.nd.waitall()
    net.add(gluon.nn.HybridLambda(lambda F, x: x + fails(x.context)))
    with pytest.raises(mx.MXNetError):
        accuracy(net, examples([4] * 6), cpus(2))
    mx.nd.waitall()


def test_an_error_from_before_is_told_as_such_and_only_once():
    net = network(2)
    fails(mx.cpu(0))
    with raises(mx.MXNetError, "before", "cleared"):
        train(net, sgd(net), examples(), 2)
    assert flat(net) == flat(network(2))
    train(net, sgd(net), examples(), 2)


# ---------------------------------------------------------------------- devices that wait
# Where they aren't refused, most of these hang or crash: so they run in another process.

Sync = gluon.contrib.nn.SyncBatchNorm


class ByOperator(gluon.HybridBlock):
    """The operator itself, without Gluon's layer."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            for name in ("gamma", "beta", "mean", "var"):
                setattr(self, name, self.params.get(name, shape=(5,), init=mx.init.One()))
        self.mean.grad_req = self.var.grad_req = "null"

    def hybrid_forward(self, F, x, gamma, beta, mean, var):
        return F.contrib.SyncBatchNorm(x, gamma, beta, mean, var, ndev=4, key=self.prefix)


def synchronised(k, *norms, hybrid=False):
    net = (gluon.nn.HybridSequential if hybrid else gluon.nn.Sequential)()
    net.add(gluon.nn.Dense(5, in_units=4), *norms, gluon.nn.Dense(3, in_units=5))
    net.initialize(mx.init.Zero(), ctx=cpus(k))
    start(net)
    if hybrid:
        net.hybridize()
    return net


def norm(devices=4, **more):
    return Sync(in_channels=5, num_devices=devices, **more)


def twice():
    one = norm()
    return synchronised(4, one, one)


MEETINGS = {  # a network on four devices; sizes of batches; what is said, if it is refused
    "fewer than devices": (lambda: synchronised(4, norm()), [8, 2], "gave 2 examples for 4"),
    "uneven": (lambda: synchronised(4, norm(), hybrid=True), [6], "gave 6 examples for 4"),
    "the operator": (lambda: synchronised(4, ByOperator()), [2], "gave 2 examples for 4"),
    "waits for more": (lambda: synchronised(4, norm(5)), [8], "num_devices=5, but there are 4"),
    "waits for fewer": (lambda: synchronised(4, norm(2)), [8], "num_devices=2, but there are 4"),
    "twice in a pass": (twice, [8], "is used twice in a forward pass"),
    "frozen statistics": (lambda: synchronised(4, norm(use_global_stats=True)), [8, 2], None),
}


def meet():
    """Print what is said of each, and how far equal shards are from one device's BatchNorm."""
    said = {}
    for what, (make, sizes, _) in MEETINGS.items():
        net = make()
        try:
            train(net, sgd(net), examples(sizes, dtype="float32"), 4)
        except ValueError as error:
            said[what] = str(error)
    one, four = synchronised(1, gluon.nn.BatchNorm(in_channels=5)), synchronised(4, norm())
    plain(one, sgd(one), examples([8, 12], dtype="float32"))
    train(four, sgd(four), examples([8, 12], dtype="float32"), 4)
    apart = [np.abs(a - b).max() for replica in weights(four)
             for a, b in zip(replica, weights(one)[0], strict=True)]
    print(json.dumps([said, float(max(apart))]))


def test_where_devices_wait_for_each_other_all_come_with_equal_shards_or_it_is_refused():
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here.parents[1]), str(here)])
    done = subprocess.run([sys.executable, "-c", "import test_training; test_training.meet()"],
                          env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
                          timeout=180)
    assert done.returncode == 0, done.stderr
    said, apart = json.loads(done.stdout)
    for what, (*_, words) in MEETINGS.items():
        assert words is None and what not in said or words in said[what], what
    assert apart < 1e-5


# ---------------------------------------------------------------------- interrupts
# Real signals, raised in this process at chosen moments.


@pytest.fixture(autouse=True)
def handler():
    """Python's own handler, which must be there afterwards too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt():
    signal.raise_signal(signal.SIGINT)


def after_each_step(sizes):
    """The weights of a plain run after 0, 1, ... steps."""
    net = network(2)
    trainer, every = sgd(net), [flat(net)]
    for batch in examples(sizes):
        train(net, trainer, [batch], 2)
        every.append(flat(net))
    return every


class AtLine:
    """Interrupts before the line of this number, of all that the block runs outside this file.

    Python loses what is raised in a `__del__` or by the garbage collector, so not there.
    """

    def __init__(self, number):
        self.number, self.lines, self.done = number, 0, False

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
                    interrupt()
        return self._trace


# What an exception leaves half made may fail again while it is thrown away.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_whole_steps_and_training_goes_on(capfd):
    batches, expected = examples(SHORT), after_each_step(SHORT)
    more = {"test": batches[:1], "progress": True}

    def interrupted_at(moment):
        net = network(2)
        trainer, interrupted = sgd(net), False
        with AtLine(moment) as at:
            try:
                train(net, trainer, batches, 2, **more)
            except KeyboardInterrupt:
                interrupted = True
        assert interrupted == at.done, f"swallowed at line {moment}"
        assert mx.context.current_context() == mx.cpu(0), f"another context after line {moment}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert flat(net) in expected, f"half a step at line {moment}"
        steps = expected.index(flat(net))
        if rest := batches[steps:]:
            train(net, trainer, rest, 2)
        assert flat(net) == expected[-1]
        return at.lines, steps

    interrupted_at(math.inf)  # with more lines, the first time
    lines, steps = interrupted_at(math.inf)
    assert steps == 3
    # How often the bar is drawn depends on time, so the last moment may come too late.
    moments = np.linspace(1, lines, 30).astype(int)
    assert {0, 1, 2, 3} == {interrupted_at(moment)[1] for moment in moments}
    net = network(2)
    thread = threading.Thread(target=lambda: train(net, sgd(net), batches, 2, **more), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "an interrupt left a lock of the progress bar shut"
    assert flat(net) == expected[-1], "training in another thread"


def within_a_step(at, act):
    """A loss, on two devices, that calls `act` in a step's middle: on the second device."""
    calls = itertools.count()

    def loss(out, y):
        if next(calls) == 2 * at + 1:
            act()
        return ENTROPY(out, y)

    return loss


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)])
def test_loaded_states_go_on_as_where_they_were_saved(kind, first, second, tmp_path):
    """MXNet counts steps by device number: a schedule stands still, Adam's begins anew."""
    def made(device):
        net = gluon.nn.Dense(3, in_units=4)
        net.initialize(mx.init.Constant(0.1), ctx=mx.cpu(device))
        schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.3)
        return net, gluon.Trainer(net.collect_params(), kind, {"lr_scheduler": schedule})

    x = mx.nd.array(np.random.default_rng(0).normal(size=(8, 4)))
    batches = [(x, mx.nd.array([0, 1, 2, 0, 1, 2, 0, 1]))] * 4
    net, trainer = made(first)
    fit(net, trainer, batches, [mx.cpu(first)], progress=False)
    net.save_parameters(str(tmp_path / "weights"))
    trainer.save_states(str(tmp_path / "states"))
    stayed = fit(net, trainer, batches, [mx.cpu(first)], progress=False).losses
    net, trainer = made(second)
    net.load_parameters(str(tmp_path / "weights"), ctx=mx.cpu(second))
    trainer.load_states(str(tmp_path / "states"))
    assert fit(net, trainer, batches, [mx.cpu(second)], progress=False).losses == stayed


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_takes_effect_at_the_steps_end(at):
    net, then = network(2), []
    loss = within_a_step(at, lambda: (interrupt(), then.append("went on")))
    with pytest.raises(KeyboardInterrupt, match="between two steps"):
        train(net, sgd(net), examples(SHORT[:2] + [6]), 2, loss=loss)
    assert then == ["went on"]
    assert flat(net) == after_each_step(SHORT[:2] + [6])[at + 1]


def test_an_interrupt_within_the_trainers_step_waits_for_its_end():
    """After half of its parameters replicas are equal too, so comparing them wouldn't show it."""
    net = network(2)
    trainer = sgd(net)
    trainer._init_kvstore()
    pushpull, calls = trainer._kvstore.pushpull, []

    def pushpull_and_press(*args, **options):
        pushpull(*args, **options)
        calls.append(1)
        if len(calls) == 6:  # of four a step
            interrupt()

    trainer._kvstore.pushpull = pushpull_and_press
    with pytest.raises(KeyboardInterrupt):
        train(net, trainer, examples([4, 6, 8]), 2)
    assert flat(net) == after_each_step([4, 6, 8])[2]


def test_an_interrupt_while_batches_are_made_and_before_the_shapes_are_known():
    net = gluon.nn.Dense(3)
    net.initialize(ctx=cpus(2))

    def batches():
        interrupt()
        yield from examples(SHORT)

    with pytest.raises(KeyboardInterrupt):
        train(net, sgd(net), batches(), 2)
    assert net.weight.list_ctx() == cpus(2)


def test_who_handles_interrupts_gets_them_after_the_step():
    came, net, asked = [], network(2), []

    def batches():
        for batch in examples([5, 4, 6]):
            asked.append(batch)
            yield batch

    previous = signal.signal(signal.SIGINT, lambda *_: came.append(len(asked)))
    try:
        history = train(net, sgd(net), batches(), 2, loss=within_a_step(1, interrupt))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert came == [2] and len(history.losses) == 3


def test_replicas_that_have_parted_are_noticed_at_an_interrupt_too():
    net = network(2)
    with pytest.raises(BaseException, match="differ") as error:  # KeyboardInterrupt ends pytest
        train(net, sgd(net, kvstore=None), examples([5, 4]), 2, loss=within_a_step(0, interrupt))
    assert error.type is AssertionError
