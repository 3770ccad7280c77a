"""The drawings of chapter 02: shards, labels and gradients are those that MXNet gives."""

import helpers
import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from svg import SVG, read, texts, with_class

THREE = [mx.cpu(rank) for rank in range(3)]


def digit_in(image):
    """The lit pixels of an image, from its corner."""
    corner, *pixels = list(image)
    return tuple((round(float(pixel.get("x")) - float(corner.get("x"))),
                  round(float(pixel.get("y")) - float(corner.get("y")))) for pixel in pixels)


def test_rows_and_labels_are_cut_alike():
    shards = with_class(read("batch_to_shards"), "shard")
    expected = helpers.split_and_load(nd.arange(10), THREE, even=False)
    assert len(shards) == 3
    pictures = set()
    for device, (shard, rows) in enumerate(zip(shards, expected)):
        drawn = with_class(shard, "row")
        labels = [int(row.findtext(SVG + "text")) for row in drawn]
        assert labels == [int(row.get("data-row")) for row in drawn] == rows.asnumpy().tolist()
        assert f"cpu({device})" in "".join(shard.itertext())
        pictures.update(digit_in(row.find(SVG + "g")) for row in drawn)
    assert len(pictures) == 10, "two digits look the same"


def test_nine_of_ten_images_get_a_dealt_label_of_another():
    root = read("labels_dealt")
    images = np.concatenate(np.array_split(np.arange(10), 3))
    labels = np.concatenate([np.arange(10)[rank::3] for rank in range(3)])
    pairs = with_class(root, "pair")
    assert [int(pair.get("data-image")) for pair in pairs] == images.tolist()
    assert [int(pair.findtext(SVG + "text")) for pair in pairs] == labels.tolist()
    crossed = [len(pair.findall(SVG + "line")) == 3 for pair in pairs]
    assert crossed == (images != labels).tolist()
    assert f"{sum(images != labels)} of 10 images get another image's label" in texts(root)


def test_a_device_without_data_keeps_its_gradient():
    weights = [nd.ones(1, ctx=device) for device in THREE]
    for weight in weights:
        weight.attach_grad()
    steps = with_class(read("device_without_data"), "step")
    for step, examples, used in zip(steps, (nd.arange(1, 7), nd.arange(1, 3)), (3, 2), strict=True):
        for shard, weight in zip(helpers.split_and_load(examples, THREE[:used]), weights):
            with autograd.record():
                loss = (weight * shard).sum()
            loss.backward()
        gradients = with_class(step, "gradient")
        expected = [int(weight.grad.asscalar()) for weight in weights]
        assert [int(gradient.findtext(SVG + "text")) for gradient in gradients] == expected
        is_old = [gradient.get("data-old") == "yes" for gradient in gradients]
        assert is_old == [rank >= used for rank in range(3)]
        (total,) = with_class(step, "sum")
        assert texts(total)[0].endswith(f"= {sum(expected)}")
        assert int(total.get("data-right")) == examples.sum().asscalar()
