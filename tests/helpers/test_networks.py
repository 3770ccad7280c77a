"""The shared networks: sizes by formula; by hand, in Gluon and in PyTorch they compute the same."""

import helpers  # noqa: F401  (first, so that MXNet finds its settings)
import mxnet as mx
import numpy as np
import pytest
from common import cpus
from mxnet import autograd, gluon, npx

from helpers import by_hand
from helpers.compare import largest_difference
from helpers.networks import hybrid_resnet18, lenet

IMAGES = np.random.default_rng(0).standard_normal((3, 1, 28, 28)).astype("float32")
LENET = (20 * 9 + 20) + (50 * 20 * 25 + 50) + (128 * 800 + 128) + (10 * 128 + 10)
RESNET = 11_175_818  # trained parameters


def trained(net):
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def test_lenet_has_its_size_and_scores():
    net = lenet()
    net.initialize(mx.init.Xavier())
    assert net(mx.nd.array(IMAGES)).shape == (3, 10)
    assert sum(p.data().size for p in trained(net)) == LENET == 129_068


@pytest.fixture(params=["nd", "np"])
def array(request):
    """What makes an array of MXNet's first kind, or of its second one, which then is in force."""
    if request.param == "np":
        npx.set_np()
    yield getattr(mx, request.param).array
    npx.reset_np()


def test_resnet18_has_its_size_and_is_hybridised_to_the_same_scores(array):
    net = hybrid_resnet18(10)
    net.initialize(mx.init.Xavier())
    x = array(IMAGES)
    scores = net(x).asnumpy()
    assert scores.shape == (3, 10)
    assert sum(p.data().size for p in trained(net)) == RESNET
    net.hybridize()
    assert largest_difference(net(x), scores) < 1e-5


def gluons_lenet(params):
    """Chapter 04's network in Gluon, with its parameters; a dense layer's weight is `[out, in]`."""
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Conv2D(20, 3, activation="relu", in_channels=1), gluon.nn.AvgPool2D(),
            gluon.nn.Conv2D(50, 5, activation="relu", in_channels=20), gluon.nn.AvgPool2D(),
            gluon.nn.Dense(128, activation="relu", in_units=800),
            gluon.nn.Dense(10, in_units=128))
    net.cast("float64")
    net.initialize()
    for p, values in zip(net.collect_params().values(), params, strict=True):
        p.set_data(mx.nd.array(values.T if values.ndim == 2 else values, dtype="float64"))
    return net


def test_lenet_by_hand_on_three_devices_is_gluons_trained_on_one():
    rng, params = np.random.default_rng(1), by_hand.init_params(seed=3)
    x = mx.nd.array(rng.standard_normal((7, 1, 28, 28)), dtype="float64")
    y = mx.nd.array(rng.integers(0, 10, 7))
    net = gluons_lenet(params)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    replicas = [by_hand.get_params(params, device, "float64") for device in cpus(3)]
    assert largest_difference(by_hand.lenet(x, replicas[0]), net(x)) < 1e-12
    for _ in range(2):
        with autograd.record():
            losses = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
        losses.backward()
        trainer.step(7)
        loss = by_hand.train_batch(x, y, replicas, cpus(3), lr=0.125)
        assert largest_difference(loss, losses.mean()) < 1e-6
    expected = [p.data().asnumpy() for p in net.collect_params().values()]
    expected = [values.T if values.ndim == 2 else values for values in expected]
    assert largest_difference(replicas, expected) < 1e-6  # MXNet rounds 1/7 to float32
    assert largest_difference(params, expected) > 1e-3, "it must learn"


def test_pytorchs_lenet_computes_the_same():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    from helpers import torch_networks

    ours = lenet()
    ours.initialize(mx.init.Xavier())
    scores = ours(mx.nd.array(IMAGES))
    theirs = torch_networks.lenet()
    for p, q in zip(trained(ours), theirs.parameters(), strict=True):
        q.data = torch.tensor(p.data().asnumpy())
    assert largest_difference(theirs(torch.tensor(IMAGES)), scores) < 1e-5
