"""The drawings of chapter 18: the numbers of its two matrices, computed by NumPy."""

import numpy as np
from svg import read, texts, with_class

X = np.array([1, 2])
A = np.array([[1, 2, 0, -1], [1, -2, 2, 1]])
B = np.array([[1, 2], [3, 1], [0, 1], [2, 0]])
HALVES = [slice(0, 2), slice(2, 4)]


def numbers(drawing, name):
    """Of each element of that class, in their order: of rank 0, of rank 1."""
    return [[int(text.replace("\u2212", "-")) for text in texts(element)]
            for element in with_class(drawing, name)]


def test_two_matrices_forward():
    drawing = read("two_matrices")
    middle = np.maximum(X @ A, 0)
    assert numbers(drawing, "A") == [list(A[:, half].ravel()) for half in HALVES]
    assert numbers(drawing, "B") == [list(B[half].ravel()) for half in HALVES]
    assert numbers(drawing, "before") == [list((X @ A)[half]) for half in HALVES]
    assert numbers(drawing, "middle") == [list(middle[half]) for half in HALVES]
    assert numbers(drawing, "part") == [list(middle[half] @ B[half]) for half in HALVES]
    assert numbers(drawing, "sum") == [list(middle @ B)] * 2


def test_two_matrices_backward():
    drawing = read("two_matrices_backward")
    of_middle = np.ones(2, int) @ B.T * (X @ A > 0)
    assert numbers(drawing, "of-y") == [[1, 1]] * 2
    assert numbers(drawing, "of-x") == [list(of_middle[half] @ A.T[half]) for half in HALVES]
    assert numbers(drawing, "sum") == [list(of_middle @ A.T)] * 2


def test_a_block_exchanges_twice_forward_and_twice_backward():
    ways = [bar.get("data-way") for bar in with_class(read("block_on_ranks"), "exchange")]
    assert ways == ["backward", "forward"] * 2


def test_a_block_by_tokens_is_cut_by_tokens_and_by_columns_in_turn():
    drawing = read("block_by_tokens")
    names = [bar.get("data-name") for bar in with_class(drawing, "exchange")]
    assert names == ["gather", "scatter"] * 2
    for name, axis in (("by-tokens", 1), ("by-columns", 0)):
        for grid in with_class(drawing, name):
            expected = np.arange(4) // 2 == int(grid.get("data-rank"))
            held = np.array([cell.get("fill") != "white" for cell in grid]).reshape(4, 4)
            assert (held.all(axis) == expected).all() and (held.any(axis) == expected).all()


def test_the_loss_from_three_numbers():
    drawing = read("three_numbers")
    logits = np.array([[3.0, 1], [5, 2]])
    largest = logits.max()
    sums = np.exp(logits - largest).sum(1)
    of_label = [logits[0, 1] - largest, 0]
    rows = list(zip(logits.max(1), sums, of_label)) + [(largest, sums.sum(), sum(of_label))]
    drawn = [[float(text.replace("\u2212", "-")) for text in texts(element)]
             for name in ("part", "together") for element in with_class(drawing, name)]
    assert np.allclose(drawn, rows, atol=0.0005)
    (loss,) = [element.text for element in with_class(drawing, "loss")]
    assert loss.endswith(f"= {np.log(sums.sum()) - sum(of_label):.3f}")
