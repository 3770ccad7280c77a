"""The drawings of chapter 13: both frameworks agree."""


import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd
from svg import SVG, classes, read, with_class


def entries():
    """`{what is meant: (MXNet's word, PyTorch's, kind)}`, from the drawing."""
    found = {}
    for entry in with_class(read("dictionary"), "entry"):
        texts = [text.text for text in entry.iter(SVG + "text")]
        [ours] = [text.text for text in entry.iter(SVG + "text") if "ours" in classes(text)]
        [theirs] = [text.text for text in entry.iter(SVG + "text") if "theirs" in classes(text)]
        kind = entry.get("data-kind")
        assert ("=" in texts, "≠" in texts) == (kind == "same", kind == "other")
        found[texts[0]] = ours, theirs, kind
    return found


def test_the_dictionary_says_what_both_do():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    found = entries()
    assert len(found) == 6
    four = [mx.cpu(rank) for rank in range(4)]
    ours = [len(shard) for shard in
            gluon.utils.split_and_load(nd.arange(10), four, even_split=False)]
    theirs = [len(shard) for shard in torch.arange(10).chunk(4)]
    assert found["cut 10 for 4"] == (" ".join(map(str, ours)), " ".join(map(str, theirs)), "other")

    w = nd.array([3.0])
    w.attach_grad()
    v = torch.tensor([3.0], requires_grad=True)
    for _ in range(2):
        with autograd.record():
            loss = w * w
        loss.backward()
        (v * v).sum().backward()
    assert (w.grad.asscalar(), v.grad.item()) == (6, 12)
    assert found["2nd backward"] == ("replaces grad", "adds to grad", "other")

    scores, answers = [[2.0, 0.0], [0.0, 1.0]], [0, 1]
    losses = gluon.loss.SoftmaxCrossEntropyLoss()(nd.array(scores), nd.array(answers))
    loss = torch.nn.functional.cross_entropy(torch.tensor(scores), torch.tensor(answers))
    assert losses.shape == (2,) and loss.item() == pytest.approx(losses.mean().asscalar(), rel=1e-3)
    assert found["loss"] == ("one per image", "their mean", "other")
    assert nd.ones(1, ctx=mx.cpu(1)).context == mx.cpu(1)
    assert torch.ones(1, device="cpu:1").device == torch.device("cpu")
    assert found["2nd device"] == ("mx.cpu(1)", "cpu:1 is cpu", "other")
    assert found["move"] == ("as_in_context", "to", "same")
    assert found["momentum"] == ("rate in velocity", "rate afterwards", "other")  # run there


@pytest.mark.parametrize("kind", ["shard", "scores"])
def test_data_parallel_has_the_shards_of_chunk(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    sizes = [len(shard) for shard in torch.arange(10).chunk(3)]
    drawn = with_class(read("data_parallel"), kind)
    assert [int(box.get("data-images")) for box in drawn] == sizes
    assert len(with_class(read("data_parallel"), "replica")) == len(sizes)
