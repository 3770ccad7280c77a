"""The drawings of chapter 13: files are what the program draws, and both frameworks agree."""

from pathlib import Path
from xml.etree import ElementTree

import draw_torch
import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd
from test_drawings import (
    SVG,
    classes,
    with_class,
)

FOLDER = Path(__file__).parents[1] / "notebooks/src/drawings"
NAMES = ["data_parallel", "dictionary"]


def read(name):
    """The root element of a drawing."""
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot()


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


def test_the_files_are_what_the_program_draws(tmp_path):
    draw_torch.main(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == NAMES
    for name in NAMES:
        drawn = (tmp_path / f"{name}.svg").read_bytes()
        assert drawn == (FOLDER / f"{name}.svg").read_bytes(), f"{name}: run draw_torch.py"


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read(name):
    """It has a title and a description, needs nothing else, and has a white ground, large words."""
    root = read(name)
    title, description = list(root)[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert len(title.text.split()) >= 4 and len(description.text.split()) >= 20
    allowed = {"svg", "title", "desc", "g", "rect", "line", "polygon", "text"}
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in allowed
        assert not any(key.startswith("on") or "href" in key for key in element.attrib)
    left, top, width, height = map(int, root.get("viewBox").split())
    assert (left, top) == (0, 0) and 560 <= width <= 640
    background = root.find(SVG + "rect")
    assert (background.get("fill"), background.get("width")) == ("white", str(width))
    for text in root.iter(SVG + "text"):
        assert float(text.get("font-size")) * 390 / width >= 10, text.text


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
    assert found["device"] == ("ctx=mx.cpu(0)", 'device="cpu"', "same")
    assert found["move"] == ("as_in_context", "to", "same")
    assert found["momentum"] == ("rate in velocity", "rate afterwards", "other")  # run there


@pytest.mark.parametrize("kind", ["shard", "scores"])
def test_data_parallel_has_the_shards_of_chunk(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    sizes = [len(shard) for shard in torch.arange(10).chunk(3)]
    drawn = with_class(read("data_parallel"), kind)
    assert [int(box.get("data-images")) for box in drawn] == sizes
    assert len(with_class(read("data_parallel"), "replica")) == len(sizes)
