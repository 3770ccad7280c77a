"""The drawings of chapters 13 and 14: losses and gradients of one weight; buckets."""

import numpy as np
from svg import read, texts, with_class


def test_the_first_step_in_gluon_and_in_pytorch():
    x = np.array([1, 2, 3, 4])
    losses = (3 * x) ** 2
    gradient = (-2 * x * 3 * x).sum()
    drawn = texts(read("one_step_twice"))
    assert drawn.count("losses " + ", ".join(map(str, losses))) == 2
    assert f"mean: ÷ 4, so {losses.mean()}" in drawn
    for found in (gradient, gradient // 4):
        assert f"gradient −{-found}" in drawn
    assert drawn.count(f"w = {-0.04 * gradient / 4:.1f}") == 2


def test_the_gradients_of_dataparallels_copies_add_up():
    drawing = read("data_parallel")
    (gradients,) = with_class(drawing, "gradients")
    (originals,) = with_class(drawing, "originals")
    assert texts(originals) == ["w", str(sum(map(int, texts(gradients))))]


def test_the_buckets_drawn_are_those_of_the_chapters_network_with_250_bytes():
    sizes = [16, 64, 32, 128, 32, 128]  # bytes of bias and weight, from last to first
    buckets = [[]]
    for nbytes in sizes:
        if sum(buckets[-1]) + nbytes > 250:
            buckets.append([])
        buckets[-1].append(nbytes)
    assert [len(bucket) for bucket in buckets] == [4, 2], "last and second; first"
    (way,) = [way for way in with_class(read("ddp_ways"), "way")
              if way.get("data-name") == "buckets"]
    sent = [texts(part) for part in with_class(way, "all-reduce")]
    assert sent == [["last, second"], ["first"]]
    drawn = with_class(read("ddp_buckets"), "gradient")
    assert [len(texts(gradient)) for gradient in drawn] == [2, 2, 2]
