"""The drawings of chapter 17: a block keeps what is drawn, and a step is as long."""

import pytest
from draw_one_device import BLOCK, HEADS, INPUT, LAYERS, TOKENS, WIDTH, lives
from svg import read, with_class


def test_a_block_keeps_the_numbers_that_are_drawn():
    torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
    from torch.autograd.graph import saved_tensors_hooks
    from transformer import Block

    n = 16
    block = Block(WIDTH, HEADS)
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def note(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters and tensor.dtype != torch.bool:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        block(torch.ones(n, TOKENS, WIDTH, requires_grad=True))
    drawing = read("block_keeps")
    drawn = [int(bar.get("data-numbers")) for bar in with_class(drawing, "kept")]
    (together,) = with_class(drawing, "together")
    assert 4 * n * TOKENS * sum(drawn) == sum(kept.values())
    assert sum(drawn) == int(together.get("data-numbers"))
    assert round(sum(kept.values()) / 1e6, 2) == BLOCK
    assert round(4 * n * TOKENS * WIDTH / 1e6, 2) == INPUT


def test_a_step_takes_three_passes_a_block_and_four_with_recomputation():
    drawn = with_class(read("saw"), "life")
    for recomputed, passes in [(False, 3), (True, 4)]:
        spans, end = lives(recomputed)
        assert end == passes * LAYERS == max(
            int(life.get("data-end")) for life in drawn
            if life.get("data-recomputed") == str(int(recomputed)))
        assert [span[3] for span in spans] == [end - (passes - 1) * place
                                               for place in range(LAYERS)]
