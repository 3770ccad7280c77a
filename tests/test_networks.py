"""The shared networks: sizes by formula, and Gluon's and PyTorch's compute the same."""

import helpers  # noqa: F401  (first, so that MXNet finds its settings)
import mxnet as mx
import numpy as np
import pytest
from mxnet import npx

from helpers.compare import largest_difference
from helpers.networks import hybrid_resnet18, lenet

IMAGES = np.random.default_rng(0).standard_normal((3, 1, 28, 28)).astype("float32")
LENET = (20 * 9 + 20) + (50 * 20 * 25 + 50) + (128 * 800 + 128) + (10 * 128 + 10)
RESNET = 11_175_818  # trained parameters, as chapter 08 counts them


def trained(net):
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def test_lenet_has_its_size_and_scores():
    net = lenet()
    net.initialize(mx.init.Xavier())
    assert net(mx.nd.array(IMAGES)).shape == (3, 10)
    assert sum(p.data().size for p in trained(net)) == LENET == 129_068


@pytest.fixture
def np_mode():
    npx.set_np()
    yield
    npx.reset_np()


def test_resnet18_has_its_size_and_is_hybridised_to_the_same_scores(np_mode):
    net = hybrid_resnet18(10)
    net.initialize(mx.init.Xavier())
    x = mx.np.array(IMAGES)
    scores = net(x).asnumpy()
    assert scores.shape == (3, 10)
    assert sum(p.data().size for p in trained(net)) == RESNET
    net.hybridize()
    assert largest_difference(net(x), scores) < 1e-5


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


def test_pytorchs_resnet18_computes_the_same(np_mode):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    from helpers import torch_networks

    ours = hybrid_resnet18(10)
    ours.initialize(mx.init.Xavier())
    x = mx.np.array(IMAGES)
    scores = ours(x)  # by running means of 0 and variances of 1, in both
    theirs = torch_networks.resnet18().eval()
    assert sum(q.numel() for q in theirs.parameters()) == RESNET
    for mine, other in zip(layers(ours), layers(theirs), strict=True):
        for gluons, torchs in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"),
                               ("beta", "bias")):
            if hasattr(mine, gluons):
                values = getattr(mine, gluons).data().asnumpy()
                getattr(other, torchs).data = torch.tensor(values)
    assert largest_difference(theirs(torch.tensor(IMAGES)), scores) < 1e-4


def layers(net):
    """The layers that have parameters, in the order in which they compute, Gluon's or PyTorch's."""
    found = []
    for part in net:
        inner = [part]
        if hasattr(part, "conv1"):
            beside = part.projection if hasattr(part, "projection") else part.project
            inner = [part.conv1, part.norm1, part.conv2, part.norm2, beside]
        found += [layer for layer in inner if hasattr(layer, "weight") or hasattr(layer, "gamma")]
    return found
