"""The drawings of chapter 08: shapes are the network's."""

import re

import helpers  # noqa: F401  (first, so that MXNet finds its settings)
import mxnet as mx

from helpers.networks import HybridResidual, hybrid_resnet18
from svg import SVG, read, with_class


def test_the_stages_have_the_networks_shapes():
    net = hybrid_resnet18(10)
    net.initialize(mx.init.Xavier())
    x = mx.nd.zeros((1, 1, 28, 28))
    shapes = [x.shape[1:]]
    block = 0
    for layer in net:
        x = layer(x)
        if isinstance(layer, HybridResidual):
            block += 1
            if block % 2 == 0:  # the second of a stage
                shapes.append(x.shape[1:])
    drawn = []
    for stage in with_class(read("resnet_stages"), "stage"):
        if stage.get("data-name") == "scores":
            assert [text.text for text in stage.iter(SVG + "text")] == ["scores", "10"]
            continue
        (pixels,), (channels,) = with_class(stage, "pixels"), with_class(stage, "channels")
        side, other = map(int, re.findall(r"\d+", pixels.text))
        drawn.append((int(re.search(r"\d+", channels.text)[0]), side, other))
        squares = {square.get("width") for square in stage.iter(SVG + "rect")}
        assert {round(float(width) / 3.1) for width in squares} == {side}, "not to scale"
    assert drawn == shapes and x.shape == (1, 10)


def test_the_block_has_its_layers_and_shapes():
    block = HybridResidual(128, strides=2, project=True)
    block.initialize()
    x = mx.nd.zeros((1, 64, 28, 28))
    expected = {"input": x, "change": block.conv2(block.conv1(x)), "beside": block.projection(x),
                "output": block(x)}
    root = read("residual_block")
    shapes = {}
    for text in with_class(root, "shape"):
        shapes[text.get("data-of")] = tuple(map(int, re.findall(r"\d+", text.text)))
    assert shapes == {name: array.shape[1:] for name, array in expected.items()}
    assert [layer.get("data-name") for layer in with_class(root, "layer")] == [
        "conv 3×3, stride 2", "norm", "ReLU", "conv 3×3", "norm", "conv 1×1, stride 2", "ReLU"]
    assert (block.conv1._kwargs["stride"], block.projection._kwargs["stride"]) == ((2, 2), (2, 2))
    assert block.projection._kwargs["kernel"] == (1, 1)


def test_the_two_scalings_have_their_images():
    drawn = {}
    for row in with_class(read("two_scalings"), "row"):
        images = [0, 0]
        for square in with_class(row, "images"):
            images[int(square.get("data-device"))] += 2
        drawn[row.get("data-name")] = images
        assert f"batch {sum(images)}" in "".join(row.itertext())
    assert drawn == {"one device": [32, 0], "strong": [16, 16], "weak": [32, 32]}
