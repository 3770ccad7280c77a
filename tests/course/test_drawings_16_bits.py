"""The drawings of *bfloat16 and scaled losses*: PyTorch's formats are as they are drawn."""

import pytest
from draw_16_bits import FORMATS, GRADIENTS, SCALES
from svg import read, with_class

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_bits_that_are_drawn(name):
    info = torch.finfo(getattr(torch, name))
    parts = [int(bit.get("data-part")) for bit in with_class(read("three_formats"), f"bit-{name}")]
    mantissa, exponent = parts.count(2), parts.count(1)
    assert len(parts) == info.bits
    assert info.eps == 2.0 ** -mantissa
    assert info.tiny == 2.0 ** (2 - 2 ** (exponent - 1))


@pytest.mark.parametrize("scale", SCALES)
def test_float16_holds_the_gradients_that_are_drawn_as_held(scale):
    becomes = {0: "vanishes", float("inf"): "overflows"}
    found = []
    for exponent in GRADIENTS:
        number = torch.tensor(2.0 ** (exponent + scale)).half().item()
        found.append(becomes.get(number, "held"))
    drawn = with_class(read("scaled_range"), f"scale-{scale}")
    assert [dot.get("data-becomes") for dot in drawn] == found
