"""The drawings of Gluon's parameters: Gluon does what they show."""

import draw_gluon
import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from svg import read, with_class

PAIR = [mx.cpu(0), mx.cpu(1)]


def drawn(root, name):
    """The numbers of the elements with a class, in order."""
    return [int(element.get("data-value")) for element in with_class(root, name)]


def values(weight):
    return [array.asnumpy().item() for array in weight.list_data()]


def gradients(weight):
    return [array.asnumpy().item() for array in weight.list_grad()]


def one_weight(devices):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(draw_gluon.WEIGHT), ctx=devices)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})


def backward(net, images):
    """Each loss its own backward; `images`: for each shard the device and its numbers."""
    losses = []
    with autograd.record():
        for device, numbers in images:
            losses.append(net(nd.array(numbers, ctx=device).reshape((-1, 1))))
    for loss in losses:
        loss.backward()


def test_the_parameter_before_and_after_a_step():
    root = read("gluon_parameter")
    net, trainer = one_weight(PAIR)
    backward(net, [(device, [image]) for device, image in zip(PAIR, drawn(root, "image"))])
    assert drawn(root, "value") == values(net.weight)
    assert drawn(root, "grad") == gradients(net.weight)
    (store,) = with_class(root, "store")
    assert int(store.get("data-sum")) == sum(gradients(net.weight))
    trainer.step(2)
    assert drawn(root, "after") == values(net.weight) == [int(store.get("data-after"))] * 2


def test_the_old_gradient_is_added_again():
    net, trainer = one_weight(PAIR)
    panels = with_class(read("old_gradient"), "panel")
    assert [panel.get("data-name") for panel in panels] == ["step 1", "step 2"]
    for panel in panels:
        images = []
        for device, element in zip(PAIR, with_class(panel, "images")):
            numbers = [int(number) for number in element.get("data-images").split()]
            if numbers:
                images.append((device, numbers))
        before = values(net.weight)[0]
        backward(net, images)
        assert drawn(panel, "grad") == gradients(net.weight)
        assert [each.get("data-old") == "yes" for each in with_class(panel, "grad")] == [
            device not in [used for used, _ in images] for device in PAIR]
        trainer.step(2)
        assert 2 * (before - values(net.weight)[0]) == int(panel.get("data-total"))


def test_a_device_named_twice_uses_its_second_replica():
    root = read("named_twice")
    net, _ = one_weight([mx.cpu(0), mx.cpu(0)])
    backward(net, [(mx.cpu(0), [image]) for image in drawn(root, "image")])
    assert drawn(root, "grad") == gradients(net.weight)
    assert len(with_class(root, "use")) == 2
